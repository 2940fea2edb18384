"""The results of a conversion, in one JSON file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from subquad.conversion.diagnosis import Diagnosis
from subquad.conversion.repair.keep_search import Kept, Trial
from subquad.conversion.repair.schedule import StageProgress
from subquad.errors import InputError
from subquad.models.converted import record
from subquad.runs.results_file import Count, MethodName, load_results, write_results
from subquad.runs.typed_json import MisfitError, Scalar, dumps, misfit

SCHEMA, VERSION = "subquad.convert", 1
FILE = "results.json"
SWAP, KEEP = "naive swap", "keep"  # steps of a conversion besides the stages of repair


class TextFacts(TypedDict, total=False):
    """The calibration text: its files, and the numbers of evaluation and training tokens. Empty without text."""

    files: list[str]
    judged_by: Count
    learnt_from: Count


@dataclass
class Results:
    """One conversion.

    Args:
        model: the folder or hub name of the original model; `architecture` is its class.
        method, options: the mechanism, with all of its options.
        settings: what must be the same for a run to be resumed, see `Plan.identity`.
        conversion: the record in the config of the converted model: the mechanism of every site.
        diagnoses: by the step after which each was made.
        tried: the trials of an unfinished keep search; those of a finished one are in `kept`.
        stages: the stages of repair so far.
        is_saved: the model has been saved, and nothing is left to do.
    """

    model: str
    architecture: str
    method: MethodName
    options: dict[str, Any]
    settings: dict[str, Any]
    machine: dict[str, Scalar]
    command: str = ""
    calibration: TextFacts = field(default_factory=TextFacts)
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
    return load_results(path, SCHEMA, VERSION, Results, _require_sense)


def _require_sense(results: Results) -> None:
    """A whole record of the conversion; steps in their order; heads and losses that belong together."""
    try:
        record.from_json(results.conversion)
    except InputError as error:
        raise MisfitError(f"conversion: {error}") from error
    if next(iter(results.diagnoses), SWAP) != SWAP:
        raise misfit("diagnoses", f"must begin with {SWAP!r}", list(results.diagnoses))
    heads = {step: {(head.site, head.head) for head in found.heads} for step, found in results.diagnoses.items()}
    for step, found in heads.items():
        if not found <= heads[SWAP]:
            raise MisfitError(f"diagnoses[{step!r}] must have no heads that {SWAP!r} does not have")
    if results.kept is not None and len(results.kept.losses) != len(results.kept.layers) + 1:
        raise misfit("kept.losses", "must be one before the search, and one for each layer", results.kept.losses)


def as_json(results: Results) -> str:
    return dumps(plain(results), indent=2)


def plain(results: Results) -> dict[str, Any]:
    """For JSON, which has no NaN: the loss of a stage before its first step becomes null."""
    found = asdict(results)
    for stage in found["stages"].values():
        stage["loss"] = stage["loss"] if math.isfinite(stage["loss"]) else None
    return found
