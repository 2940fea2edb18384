"""The results of a training run, finished or not: one record per method, in one JSON file that is written atomically."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from subquad.runs.results_file import Count, MethodName, Positive, load_results, write_results
from subquad.runs.typed_json import Between, Figure, MisfitError, Scalar, dumps, misfit

SCHEMA, VERSION = "subquad.train", 1
FILE = "results.json"
Status = Literal["waiting", "running", "stopped", "done", "diverged", "failed", "refused"]
UNFINISHED: tuple[Status, ...] = ("running", "stopped", "failed")  # what --resume continues
Loss = Annotated[float, Between(-1e39, 1e39)]  # of float32
Seconds = Annotated[float, Between(0, 1e12)]


@dataclass
class Record:
    """One method: its progress, cost and scores.

    Args:
        options: all options of the mechanism.
        why: why it failed, diverged or was refused.
        step, steps: steps done, and steps in all.
        losses: (step, mean training loss since the previous point).
        eval_rows: how many validation rows an evaluation reads, the same ones each time.
        evals: figures on those rows, each with its "step".
        best_step: the step of the best model, by the task's metric.
        test: the figures of the best model on the test rows.
        step_seconds: median time of a step: forward, backward and update, without loading data.
        peak_bytes: peak memory of training, beyond what the process held before it made the model.
        seconds: total time, evaluations included, over all sessions.
        processes, threads: those of the last session.
        data: the fingerprint of the rows for training and scoring.
    """

    method: MethodName
    options: dict[str, Any] = field(default_factory=dict)
    status: Status = "waiting"
    why: str = ""
    parameters: Count | None = None
    step: Count = 0
    steps: Count | None = None
    losses: list[tuple[Count, Loss]] = field(default_factory=list)
    eval_rows: Count | None = None
    evals: list[dict[str, float]] = field(default_factory=list)
    best_step: Count | None = None
    test: dict[str, Figure] = field(default_factory=dict)
    step_seconds: Seconds | None = None
    peak_bytes: Count | None = None
    seconds: Seconds = 0.0
    processes: Positive = 1
    threads: Positive = 1
    data: str = ""

    @property
    def best(self) -> dict[str, float] | None:
        """The figures of the best model on the validation rows."""
        return next((found for found in self.evals if found["step"] == self.best_step), None)

    @property
    def loss(self) -> float | None:
        """The last training loss."""
        return self.losses[-1][1] if self.losses else None


class TaskFacts(TypedDict):
    """What the file says about its task, so that it can be read on its own."""

    name: str
    idea: str
    kind: str
    metric: str
    source: str
    higher_is_better: bool


@dataclass
class Results:
    """One table: a task, its settings, and every method that was trained on it.

    Args:
        settings: those of all methods; a run can be resumed only with the same ones.
    """

    task: TaskFacts
    settings: dict[str, Any]
    machine: dict[str, Scalar]
    command: str = ""
    records: list[Record] = field(default_factory=list)

    def record(self, method: str) -> Record | None:
        return next((r for r in self.records if r.method == method), None)

    def put(self, record: Record) -> None:
        """Replace the record of that method, or add it."""
        names = [r.method for r in self.records]
        if record.method in names:
            self.records[names.index(record.method)] = record
        else:
            self.records.append(record)

    @property
    def metric(self) -> str:
        return self.task["metric"]

    @property
    def data(self) -> str:
        """The fingerprint of the rows that the methods of this table were trained on; empty if none has begun."""
        return next((r.data for r in self.records if r.data), "")

    @property
    def is_finished(self) -> bool:
        return all(r.status in ("done", "diverged", "refused") for r in self.records)

    def ranked(self) -> Iterator[Record]:
        """Best test score first; then those without one."""
        sign = -1 if self.task["higher_is_better"] else 1
        scores = {r.method: sign * r.test.get(self.metric, math.nan) for r in self.records}
        yield from sorted(self.records, key=lambda r: (math.isnan(scores[r.method]), scores[r.method]))


def record_from(saved: dict[str, Any]) -> Record:
    return Record(**{**saved, "losses": [(int(step), loss) for step, loss in saved["losses"]]})


def save(results: Results, path: Path) -> None:
    """Write the results file atomically."""
    write_results(path, SCHEMA, VERSION, asdict(results))


def load(path: Path) -> Results:
    """Read a results file."""
    return load_results(path, SCHEMA, VERSION, Results, _require_sense)


def _require_sense(results: Results) -> None:
    names = [record.method for record in results.records]
    if len(set(names)) != len(names):
        raise misfit("records", "must have each method once", names)
    for record in results.records:
        if record.status == "done" and record.step != record.steps:
            raise MisfitError(f"{record.method} must have made {record.steps} steps to be done; got {record.step}")
        require_steps(record)


def require_steps(record: Record) -> None:
    """Each evaluation says after which step it was made."""
    if any("step" not in found for found in record.evals):
        raise MisfitError(f"the evals of {record.method} must each have a step")


def as_json(results: Results) -> str:
    return dumps(asdict(results), indent=2)
