"""The results of a comparison, finished or not: one JSON file that is written atomically.

A *cell* is one quantity of one method at one length. Times come in rounds: each is the method's time and that of the baseline
(`sdpa`) in the same round, so that what slows down the machine for a while cancels in their ratio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from subquad.runs.results_file import Count, MethodName, Positive, load_results, write_results
from subquad.runs.typed_json import Between, Figure, Scalar, misfit

SCHEMA, VERSION = "subquad.compare", 1
BASELINE = "sdpa"
Pass = Literal["forward", "training", "decode"]  # training: forward and backward; decode: one token after `length` others
PASSES: tuple[Pass, ...] = get_args(Pass)
Status = Literal["measured", "predicted", "refused", "failed"]
STATUSES: tuple[Status, ...] = get_args(Status)
LONGEST = 2**24  # tokens
Tokens = Annotated[int, Between(1, LONGEST)]
Seconds = Annotated[float, Between(1e-9, 1e9)]
PredictedSeconds = Annotated[float, Between(1e-9, 1e40)]


@dataclass(frozen=True)
class Setting:
    """What all cells have in common."""

    heads: Positive = 8
    head_dim: Positive = 64
    batch: Positive = 1
    dtype: str = "float32"
    is_causal: bool = False
    device: str = "cpu"
    threads: Positive = 1


@dataclass
class Timing:
    """Seconds of one pass of one method at one length.

    Args:
        rounds: (seconds, seconds of the baseline in that round, or None if it was not run).
        predicted: seconds extrapolated from shorter lengths, if it was not run.
        why: why it was predicted, refused or failed.
    """

    method: MethodName
    length: Tokens
    kind: Pass
    status: Status = "measured"
    rounds: list[tuple[Seconds, Seconds | None]] = field(default_factory=list)
    predicted: PredictedSeconds | None = None
    why: str = ""


@dataclass
class Facts:
    """What is measured once: peak bytes beyond the inputs, and relative errors against exact softmax by kind of input."""

    method: MethodName
    length: Tokens
    status: Status = "measured"
    peak_bytes: Count | None = None
    errors: dict[str, Figure] = field(default_factory=dict)
    why: str = ""


@dataclass
class Results:
    """One comparison, finished or not."""

    setting: Setting
    machine: dict[str, Scalar]
    command: str = ""
    methods: list[MethodName] = field(default_factory=list)
    lengths: list[Tokens] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)
    refusals: dict[MethodName, str] = field(default_factory=dict)  # methods that cannot be compared, and why
    seconds: Annotated[float, Between(0, 1e12)] = 0.0  # spent so far
    finished: bool = False
    inputs: str = ""  # the file with a model's inputs on which errors were measured: name and fingerprint

    def timing(self, method: str, length: int, kind: Pass) -> Timing | None:
        return next((t for t in self.timings if (t.method, t.length, t.kind) == (method, length, kind)), None)

    def fact(self, method: str, length: int) -> Facts | None:
        return next((f for f in self.facts if (f.method, f.length) == (method, length)), None)

    def of(self, kind: Pass) -> Iterator[Timing]:
        return (t for t in self.timings if t.kind == kind)


def save(results: Results, path: Path) -> None:
    """Write the results file atomically."""
    write_results(path, SCHEMA, VERSION, _plain(results))


def _plain(results: Results) -> dict[str, Any]:
    records = {"timings": [vars(t) for t in results.timings], "facts": [vars(f) for f in results.facts]}
    return {**vars(results), **records, "setting": vars(results.setting)}


def load(path: Path) -> Results:
    """Read a results file."""
    return load_results(path, SCHEMA, VERSION, Results, _require_sense)


def _require_sense(results: Results) -> None:
    """No cell twice, no method twice, and lengths in order."""
    if results.lengths != sorted(set(results.lengths)):
        raise misfit("lengths", "must be in ascending order, each once", results.lengths)
    cells: dict[str, list[Any]] = {
        "methods": results.methods,
        "timings": [(t.method, t.length, t.kind) for t in results.timings],
        "facts": [(f.method, f.length) for f in results.facts],
    }
    for place, keys in cells.items():
        if repeated := [key for key, count in Counter(keys).items() if count > 1]:
            raise misfit(place, "must have each entry once", repeated[0])
