"""The results of a training run, finished or not: one record per method, in one JSON file that is written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from subquad.runs.results_file import read_results, valid_results, write_results

SCHEMA, VERSION = "subquad.train", 1
FILE = "results.json"
Status = Literal["waiting", "running", "stopped", "done", "diverged", "failed", "refused"]
UNFINISHED: tuple[Status, ...] = ("running", "stopped", "failed")  # what --resume continues


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

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    status: Status = "waiting"
    why: str = ""
    parameters: int | None = None
    step: int = 0
    steps: int | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)
    eval_rows: int | None = None
    evals: list[dict[str, float]] = field(default_factory=list)
    best_step: int | None = None
    test: dict[str, float] = field(default_factory=dict)
    step_seconds: float | None = None
    peak_bytes: int | None = None
    seconds: float = 0.0
    processes: int = 1
    threads: int = 1
    data: str = ""

    @property
    def best(self) -> dict[str, float] | None:
        """The figures of the best model on the validation rows."""
        return next((found for found in self.evals if found["step"] == self.best_step), None)

    @property
    def loss(self) -> float | None:
        """The last training loss."""
        return self.losses[-1][1] if self.losses else None


@dataclass
class Results:
    """One table: a task, its settings, and every method that was trained on it.

    Args:
        task: its name, metric and so on, so that the file can be read on its own.
        settings: those of all methods; a run can be resumed only with the same ones.
    """

    task: dict[str, Any]
    settings: dict[str, Any]
    machine: dict[str, Any]
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
        return str(self.task["metric"])

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
        scored = [r for r in self.records if self.metric in r.test]
        yield from sorted(scored, key=lambda r: sign * r.test[self.metric])
        yield from (r for r in self.records if self.metric not in r.test)


def record_from(saved: dict[str, Any]) -> Record:
    return Record(**{**saved, "losses": [(int(step), loss) for step, loss in saved["losses"]]})


def save(results: Results, path: Path) -> None:
    """Write the results file atomically."""
    write_results(path, SCHEMA, VERSION, asdict(results))


def load(path: Path) -> Results:
    """Read a results file."""
    saved = read_results(path, SCHEMA, VERSION)
    with valid_results(path):
        known = {f.name: saved[f.name] for f in fields(Results)}
        results = Results(**{**known, "records": [record_from(r) for r in known["records"]]})
        _require_sense(results)
        return results


def _require_sense(results: Results) -> None:
    """Check what the table and the page rely on: the file may have been edited."""
    if not {"metric", "higher_is_better"} <= results.task.keys():
        raise ValueError("task must have metric and higher_is_better")
    for record in results.records:
        if record.status not in get_args(Status):
            raise ValueError(
                f"the status of {record.method} must be one of {', '.join(get_args(Status))}; got {record.status!r}"
            )
        if record.status == "done" and record.step != record.steps:
            raise ValueError(f"{record.method} must have made {record.steps} steps to be done; got {record.step}")
        if not all(isinstance(figure, int | float) for figure in record.test.values()):
            raise ValueError(f"the test figures of {record.method} must be numbers; got {record.test}")


def as_json(results: Results) -> str:
    return json.dumps(asdict(results), indent=2)
