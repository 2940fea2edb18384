"""The results of a comparison, finished or not: one JSON file that is written atomically.

A *cell* is one quantity of one method at one length. Times come in rounds: each is the method's time and that of the baseline
(`sdpa`) in the same round, so that what slows down the machine for a while cancels in their ratio.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from subquad.runs.results_file import read_results, valid_results, write_results

SCHEMA, VERSION = "subquad.compare", 1
BASELINE = "sdpa"
Pass = Literal["forward", "training", "decode"]  # training: forward and backward; decode: one token after `length` others
PASSES: tuple[Pass, ...] = get_args(Pass)
Status = Literal["measured", "predicted", "refused", "failed"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Setting:
    """What all cells have in common."""

    heads: int = 8
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    is_causal: bool = False
    device: str = "cpu"
    threads: int = 1


@dataclass
class Timing:
    """Seconds of one pass of one method at one length.

    Args:
        rounds: (seconds, seconds of the baseline in that round, or None if it was not run).
        predicted: seconds extrapolated from shorter lengths, if it was not run.
        why: why it was predicted, refused or failed.
    """

    method: str
    length: int
    kind: Pass
    status: Status = "measured"
    rounds: list[tuple[float, float | None]] = field(default_factory=list)
    predicted: float | None = None
    why: str = ""


@dataclass
class Facts:
    """What is measured once: peak bytes beyond the inputs, and relative errors against exact softmax by kind of input."""

    method: str
    length: int
    status: Status = "measured"
    peak_bytes: int | None = None
    errors: dict[str, float] = field(default_factory=dict)
    why: str = ""


@dataclass
class Results:
    """One comparison, finished or not."""

    setting: Setting
    machine: dict[str, Any]
    command: str = ""
    methods: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)  # methods that cannot be compared, and why
    seconds: float = 0.0  # spent so far
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
    fields = read_results(path, SCHEMA, VERSION)
    with valid_results(path):
        fields["setting"] = Setting(**fields["setting"])
        fields["timings"] = [Timing(**{**t, "rounds": [(s, b) for s, b in t["rounds"]]}) for t in fields["timings"]]
        fields["facts"] = [Facts(**f) for f in fields["facts"]]
        return Results(**fields)
