"""What a conversion has found so far, as one JSON file that is always whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from subquad.conversion.diagnosis import Diagnosis, Head
from subquad.conversion.repair.keep import Kept, Tried
from subquad.conversion.repair.loop import StageProgress
from subquad.runs.results_file import ResultsError, read_results, write_results

SCHEMA, VERSION = "subquad.convert", 1
FILE = "results.json"
SWAP, KEEP = "naive swap", "keep"  # parts beside the stages of repair


@dataclass
class Results:
    """One conversion.

    Args:
        model: the folder or name that it came from; `architecture` is its class.
        method, options: the mechanism, with all of its options.
        settings: what a run that goes on must have, too.
        calibration: the text: files, tokens that judge, tokens that are learnt from.
        conversion: the record that stands in the config of the model: the mechanism of every site.
        diagnoses: by the part that each was made after.
        tried: what an unfinished keep search has tried; a finished one is `kept`.
        stages: of the repair, as far as they are.
        is_saved: the model stands in its folder, and nothing is left to do.
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
    tried: list[Tried] = field(default_factory=list)
    kept: Kept | None = None
    stages: dict[str, StageProgress] = field(default_factory=dict)
    is_saved: bool = False

    @property
    def naive(self) -> Diagnosis | None:
        """Of the swap alone."""
        return self.diagnoses.get(SWAP)

    @property
    def last(self) -> Diagnosis | None:
        """Of the model as it is by now."""
        return next(reversed(self.diagnoses.values()), None)

    def losses(self) -> Iterator[tuple[str, float | None, float]]:
        """(part, loss in nats a token or None, cosine to the original), the original first."""
        if self.naive is not None:
            yield "original", self.naive.loss_before, 1.0
        for part, found in self.diagnoses.items():
            yield part, found.loss_after, found.cosine


def save(results: Results, path: Path) -> None:
    """Wholly, or not at all."""
    write_results(path, SCHEMA, VERSION, plain(results))


def load(path: Path) -> Results:
    """What `save` wrote."""
    saved = read_results(path, SCHEMA, VERSION)
    try:
        known = {f.name: saved[f.name] for f in fields(Results)}
        known["diagnoses"] = {part: _diagnosis(found) for part, found in known["diagnoses"].items()}
        known["stages"] = {name: _progress(found) for name, found in known["stages"].items()}
        known["tried"] = [_tried(entry) for entry in known["tried"]]
        known["kept"] = None if known["kept"] is None else _kept(known["kept"])
        return Results(**known)
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} lacks what results of this version have ({error}). Start over with --fresh.") from error


def as_json(results: Results) -> str:
    return json.dumps(plain(results), indent=2)


def plain(results: Results) -> dict[str, Any]:
    """As JSON has it, which knows no NaN: the loss before a stage's first step."""
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
    return Kept(tuple(saved["layers"]), tuple(saved["losses"]), tuple(_tried(entry) for entry in saved["tried"]))


def _tried(saved: list[Any]) -> Tried:
    kept, layer, loss = saved
    return int(kept), int(layer), float(loss)
