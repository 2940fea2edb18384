"""The results of a conversion, in one JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from subquad.conversion.diagnosis import Diagnosis, Head
from subquad.conversion.repair.keep_search import Kept, Trial
from subquad.conversion.repair.loop import StageProgress
from subquad.runs.results_file import read_results, valid_results, write_results

SCHEMA, VERSION = "subquad.convert", 1
FILE = "results.json"
SWAP, KEEP = "naive swap", "keep"  # steps of a conversion besides the stages of repair


@dataclass
class Results:
    """One conversion.

    Args:
        model: the folder or hub name of the original model; `architecture` is its class.
        method, options: the mechanism, with all of its options.
        settings: what must be the same for a run to be resumed, see `Plan.identity`.
        calibration: the text: its files, and the numbers of evaluation and training tokens.
        conversion: the record in the config of the converted model: the mechanism of every site.
        diagnoses: by the step after which each was made.
        tried: the trials of an unfinished keep search; those of a finished one are in `kept`.
        stages: the stages of repair so far.
        is_saved: the model has been saved, and nothing is left to do.
    """

    model: str
    architecture: str
    method: str
    options: dict[str, Any]
    settings: dict[str, Any]
    machine: dict[str, Any]
    command: str = ""
    calibration: dict[str, Any] = field(default_factory=dict)
    conversion: dict[str, Any] = field(default_factory=dict)
    diagnoses: dict[str, Diagnosis] = field(default_factory=dict)
    tried: list[Trial] = field(default_factory=list)
    kept: Kept | None = None
    stages: dict[str, StageProgress] = field(default_factory=dict)
    is_saved: bool = False

    @property
    def naive(self) -> Diagnosis | None:
        """The diagnosis of the swap alone."""
        return self.diagnoses.get(SWAP)

    @property
    def last(self) -> Diagnosis | None:
        """The latest diagnosis."""
        return next(reversed(self.diagnoses.values()), None)

    def losses(self) -> Iterator[tuple[str, float | None, float]]:
        """(step, loss in nats per token or None, cosine to the original), starting with the original."""
        if self.naive is not None:
            yield "original", self.naive.loss_before, 1.0
        for step, found in self.diagnoses.items():
            yield step, found.loss_after, found.cosine


def save(results: Results, path: Path) -> None:
    """Write the results atomically."""
    write_results(path, SCHEMA, VERSION, plain(results))


def load(path: Path) -> Results:
    """The results that `save` wrote."""
    saved = read_results(path, SCHEMA, VERSION)
    with valid_results(path):
        known = {f.name: saved[f.name] for f in fields(Results)}
        known["diagnoses"] = {step: _diagnosis(found) for step, found in known["diagnoses"].items()}
        known["stages"] = {name: _progress(found) for name, found in known["stages"].items()}
        known["tried"] = [_trial(entry) for entry in known["tried"]]
        known["kept"] = None if known["kept"] is None else _kept(known["kept"])
        return Results(**known)


def as_json(results: Results) -> str:
    return json.dumps(plain(results), indent=2)


def plain(results: Results) -> dict[str, Any]:
    """For JSON, which has no NaN: the loss of a stage before its first step becomes null."""
    found = asdict(results)
    for stage in found["stages"].values():
        stage["loss"] = stage["loss"] if math.isfinite(stage["loss"]) else None
    return found


def _diagnosis(saved: dict[str, Any]) -> Diagnosis:
    return Diagnosis(**{**saved, "heads": tuple(Head(**head) for head in saved["heads"])})


def _progress(saved: dict[str, Any]) -> StageProgress:
    losses = [(int(step), float(loss)) for step, loss in saved["losses"]]
    return StageProgress(**{**saved, "losses": losses, "loss": math.nan if saved["loss"] is None else saved["loss"]})


def _kept(saved: dict[str, Any]) -> Kept:
    return Kept(tuple(saved["layers"]), tuple(saved["losses"]), tuple(_trial(entry) for entry in saved["tried"]))


def _trial(saved: list[Any]) -> Trial:
    kept, layer, loss = saved
    return int(kept), int(layer), float(loss)
