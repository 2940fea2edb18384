"""What a comparison has measured so far, as one JSON file that is always whole.

A *cell* is one quantity of one method at one length. Times come in rounds: each is the method's time, and that of the baseline
(`sdpa`) in the same round, so that their ratio does not hold what disturbed the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from subquad.runs.results_file import ResultsError, read_results, write_results

SCHEMA, VERSION = "subquad.compare", 1
BASELINE = "sdpa"
Pass = Literal["forward", "training", "decode"]  # training: forward and backward; decode: one token after `length` others
PASSES: tuple[Pass, ...] = get_args(Pass)
Status = Literal["measured", "predicted", "refused", "failed"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Setting:
    """What is the same for all cells."""

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
        rounds: (seconds, seconds of the baseline in that round or None where it was not run).
        predicted: seconds by the growth over shorter lengths, where it was not run.
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
    """What is measured once: peak bytes beyond the inputs, and relative errors against exact softmax, by kind of input."""

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
    refusals: dict[str, str] = field(default_factory=dict)  # methods that cannot do what is asked, and why
    seconds: float = 0.0  # spent so far
    finished: bool = False
    inputs: str = ""  # the saved inputs of a model, on which errors were measured too: name and fingerprint of the file

    def timing(self, method: str, length: int, kind: Pass) -> Timing | None:
        return next((t for t in self.timings if (t.method, t.length, t.kind) == (method, length, kind)), None)

    def fact(self, method: str, length: int) -> Facts | None:
        return next((f for f in self.facts if (f.method, f.length) == (method, length)), None)

    def of(self, kind: Pass) -> Iterator[Timing]:
        return (t for t in self.timings if t.kind == kind)


def save(results: Results, path: Path) -> None:
    """Wholly, or not at all."""
    write_results(path, SCHEMA, VERSION, _plain(results))


def _plain(results: Results) -> dict[str, Any]:
    records = {"timings": [vars(t) for t in results.timings], "facts": [vars(f) for f in results.facts]}
    return {**vars(results), **records, "setting": vars(results.setting)}


def load(path: Path) -> Results:
    """What `save` wrote."""
    fields = read_results(path, SCHEMA, VERSION)
    try:
        fields["setting"] = Setting(**fields["setting"])
        fields["timings"] = [Timing(**{**t, "rounds": [(s, b) for s, b in t["rounds"]]}) for t in fields["timings"]]
        fields["facts"] = [Facts(**f) for f in fields["facts"]]
        return Results(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} lacks what results of this version have ({error}). Compare anew with --fresh.") from error
