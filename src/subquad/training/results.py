"""What a training run has found so far, as one JSON file that is always whole: a record a method."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from subquad.runs.results_file import ResultsError, read, write_json

SCHEMA, VERSION = "subquad.train", 1
FILE = "results.json"
Status = Literal["waiting", "running", "stopped", "done", "diverged", "failed", "refused"]
UNFINISHED: tuple[Status, ...] = ("running", "stopped", "failed")  # what --resume goes on with


@dataclass
class Record:
    """One method: how far it is, and what it has cost and scored.

    Args:
        options: the mechanism's, all of them.
        why: why it failed, diverged or was refused.
        step, steps: how many are done, and how many there are.
        losses: (step, mean training loss since the point before).
        eval_rows: how many of the validation rows an evaluation reads, the same each time.
        evals: figures on those rows, each with its "step".
        best_step: that of the model kept as best, by the task's metric.
        test: the best model's figures on the test rows.
        step_seconds: median of a step: forward, backward and update, without the reading of data.
        peak_bytes: memory that training held at its peak beyond what the process held before there was a model.
        seconds: spent on it, evaluations included, over all sittings.
        processes, threads: that the last sitting ran on.
        data: the fingerprint of the rows it is trained and scored on.
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
        task: name, metric and so on, for those who read the file alone.
        settings: what is the same for all methods, and what a run that goes on must have, too.
    """

    task: dict[str, Any]
    settings: dict[str, Any]
    machine: dict[str, Any]
    command: str = ""
    records: list[Record] = field(default_factory=list)

    def record(self, method: str) -> Record | None:
        return next((r for r in self.records if r.method == method), None)

    def put(self, record: Record) -> None:
        """In the place of that method's record, or as a new one."""
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
        """The fingerprint of the rows that methods of this table were trained on, if any has begun."""
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
    """Wholly, or not at all."""
    write_json(path, {"schema": SCHEMA, "version": VERSION, **asdict(results)})


def load(path: Path) -> Results:
    """What `save` wrote."""
    saved = read(path, SCHEMA, VERSION)
    try:
        known = {f.name: saved[f.name] for f in fields(Results)}
        results = Results(**{**known, "records": [record_from(r) for r in known["records"]]})
        _require_sense(results)
        return results
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} lacks what results of this version have ({error}). Start over with --fresh.") from error


def _require_sense(results: Results) -> None:
    """What the table and the page rely on, whoever has edited the file."""
    if not {"metric", "higher_is_better"} <= results.task.keys():
        raise ValueError("task has a metric, and whether more of it is better")
    for record in results.records:
        if record.status not in get_args(Status):
            raise ValueError(f"the status of {record.method} is one of {', '.join(get_args(Status))}; got {record.status!r}")
        if record.status == "done" and record.step != record.steps:
            raise ValueError(f"{record.method} is done after {record.steps} steps; got {record.step}")
        if not all(isinstance(figure, int | float) for figure in record.test.values()):
            raise ValueError(f"the figures of {record.method} on test rows are numbers; got {record.test}")


def as_json(results: Results) -> str:
    return json.dumps(asdict(results), indent=2)
