"""benchmarks/results.json: a record for each cell that has ended, written atomically, kept from session to session."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import write
from benchmarks.suite.cells import Cell, identity_of
from subquad.runs.results_file import ResultsError, read_results
from subquad.training import Record, Results, load
from subquad.training.results import FILE

SCHEMA, VERSION = "subquad.results", 1
FINAL = ("done", "diverged", "refused")  # another try would not change these
_LONG = ("losses", "evals")  # curves, which stay in the cell's folder

Saved = dict[str, Any]


def read(path: Path) -> dict[str, Saved]:
    """The records by cell."""
    found: dict[str, Saved] = read_results(path, SCHEMA, VERSION)["records"] if path.exists() else {}
    return found


def merge(path: Path, cell: Cell, record: Saved) -> None:
    """Replace the record of that cell; the rest of the file is kept."""
    save(path, {**read(path), cell.name: record})


def save(path: Path, records: dict[str, Saved]) -> None:
    write(path, {"schema": SCHEMA, "version": VERSION, "records": dict(sorted(records.items()))})


def of(cell: Cell, records: dict[str, Saved]) -> Saved | None:
    """The record of that cell, if it has the cell's settings."""
    found = records.get(cell.name)
    return found if found is not None and identity_of(found) == cell.identity() else None


def is_final(record: Saved | None) -> bool:
    return record is not None and record["status"] in FINAL


def trained(cell: Cell, folder: Path) -> tuple[Results, Record] | None:
    """The results of the training run in `folder`, if its settings are the cell's."""
    try:
        results = load(folder / FILE)
    except ResultsError:
        return None
    record = results.record(cell.method)
    if record is None or {"settings": results.settings, "options": record.options} != cell.identity():
        return None
    return results, record


def made(cell: Cell, results: Results, record: Record, jobs: int) -> Saved:
    """The record of a training run."""
    return {
        **_short(record),
        **cell.identity(),
        "task": cell.task,
        "seed": cell.settings.seed,
        "metric": results.metric,
        "score": record.test.get(results.metric),
        "valid": record.best,
        "jobs": jobs,
        "machine": {name: value for name, value in results.machine.items() if name != "commit"},
        "commit": results.machine.get("commit"),
        "command": shlex.join(["subquad", *cell.command()]),
    }


def failed(cell: Cell, why: str) -> Saved:
    """The record of a training run that has left no results."""
    return {**_short(Record(cell.method, status="failed", why=why)), **cell.identity(), "task": cell.task}


def _short(record: Record) -> Saved:
    return {name: value for name, value in asdict(record).items() if name not in _LONG}
