"""Time and memory of a training step, relative to the first row of the table: in one process, in turns, on one thread.

In every round each row of a table takes one step on the batch that a training run would read then: forward, backward,
clipping and optimizer. Rows are shuffled in each round. The figures of a row are the median over rounds, and the median of
its ratios to the first row in the same round; the intervals contain the middle 80 percent. The step times in the records of
training runs were measured while other work was running, and cannot be compared.

One more step of each row, on the last batch, measures the peak of PyTorch's allocations beyond weights and optimizer. The
memory of a whole process says little about that, because it keeps freed fragments.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, middle_80_percent, write
from benchmarks.suite.cells import THREADS, Cell, Row, Table, identity_of
from subquad.bench.measure import peak_bytes
from subquad.errors import InputError
from subquad.runs.determinism import deterministic
from subquad.runs.memory import PeakMemory
from subquad.runs.progress import no_transformers_bars
from subquad.runs.results_file import read_results
from subquad.tasks.base import Batch, Splits, Task
from subquad.tasks.rows import row_count, row_lengths
from subquad.training.data import Batches, loader
from subquad.training.plan import find_task
from subquad.training.results import Record
from subquad.training.run import read_data
from subquad.training.trainer import Job, MethodTrainer

SCHEMA, VERSION = "subquad.times", 1
WARM_UP = 2  # rounds that do not count

Timed = dict[str, Any]  # of one table


def beside(results: Path) -> Path:
    """The file with the step times that belong to these records."""
    return results.with_name("times.json")


def read(path: Path) -> dict[str, Timed]:
    """The measurements by table."""
    found: dict[str, Timed] = read_results(path, SCHEMA, VERSION)["tables"] if path.exists() else {}
    return found


def merge(path: Path, table: Table, timed: Timed) -> None:
    """Replace the times of that table."""
    tables = {**read(path), table.name: timed}
    write(path, {"schema": SCHEMA, "version": VERSION, "tables": dict(sorted(tables.items()))})


def of(row: Row, timed: Timed | None) -> dict[str, Any] | None:
    """The figures of that row, if they have its settings."""
    found: dict[str, Any] | None = None if timed is None else timed["rows"].get(row.label)
    return found if found is not None and identity_of(found) == row.cells[0].identity() else None


def is_measured(table: Table, timed: Timed | None, rounds: int) -> bool:
    """Whether every row, with its current settings, has that many rounds."""
    if timed is None or timed["rounds"] < rounds:
        return False
    return all(row.label in timed["left_out"] or of(row, timed) is not None for row in table.rows())


class Runner:
    """The model and optimizer of a row, as `subquad train` makes them, and the times of its steps."""

    def __init__(self, cell: Cell, task: Task, splits: Splits, batches: Batches, folder: Path) -> None:
        self.cell, plan = cell, cell.plan
        self.seconds: list[float] = []
        self.bytes = 0  # peak of a step
        self.why = ""  # why it takes no more steps
        job = Job(plan, task, splits, cell.mechanism, folder, on_record=lambda record: None, is_stopping=lambda: False)
        torch.manual_seed(plan.settings.seed)
        model = task.model(cell.mechanism, plan.settings)
        self.trainer = MethodTrainer(job, model, Record(cell.method), batches, PeakMemory(torch.device("cpu")))
        self.trainer.current_gradient_accumulation_steps = 1
        self.model, _ = self.trainer._prepare_for_training(batches.steps, self.trainer.get_train_dataloader(), None)

    def run(self, batch: Batch) -> None:
        """Take one step, and time it."""
        try:
            self.seconds.append(self._step(batch))
        except Exception as error:  # any error of a mechanism
            self.why = f"{type(error).__name__}: {error}".splitlines()[0]

    def measure_memory(self, batch: Batch) -> None:
        """Take one step, and measure its memory."""
        self.bytes, _ = peak_bytes(lambda: self._step(batch), "cpu")

    def _step(self, batch: Batch) -> float:
        trainer = self.trainer
        begun = time.perf_counter()
        loss = trainer.training_step(self.model, batch)
        trainer._clip_grad_norm(self.model)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        self.model.zero_grad()
        seconds = time.perf_counter() - begun
        if not torch.isfinite(loss):
            raise ArithmeticError(f"the loss is {loss.item()}")
        return seconds


def measure(
    table: Table,
    rounds: int,
    data: str | None,
    command: str,
    on_progress: Callable[[int, int], None] = lambda done, count: None,
) -> Timed:
    """Measure all rows of a table; rows that fail are left out, with the reason."""
    cells, settings, task = {row.label: row.cells[0] for row in table.rows()}, table.settings, find_task(table.task)
    shuffle = random.Random(settings.seed).shuffle
    with deterministic(THREADS), no_transformers_bars(), tempfile.TemporaryDirectory() as folder:
        splits = read_data(replace(next(iter(cells.values())).plan, data=data), task)
        rows, lengths = row_count(splits.train), row_lengths(splits.train)
        batches = Batches(rows, settings.batch, WARM_UP + rounds, settings.seed, lengths=lengths)
        runners = {label: Runner(cell, task, splits, batches, Path(folder)) for label, cell in cells.items()}
        for done, batch in enumerate(loader(splits, batches), 1):
            order = [runner for runner in runners.values() if not runner.why]
            shuffle(order)
            for runner in order:
                runner.run(dict(batch))
            on_progress(done, batches.steps)
        for runner in runners.values():
            if not runner.why:
                runner.measure_memory(dict(batch))
        where = machine()
    base, first = next(iter(runners.items()))
    if first.why:
        raise InputError(f"{table.name}: all rows are compared with {base}, which failed: {first.why}")
    return {
        "command": command,
        "machine": where,
        "rounds": rounds,
        "base": base,
        "rows": {label: _row(runner, first) for label, runner in runners.items() if not runner.why},
        "left_out": {label: runner.why for label, runner in runners.items() if runner.why},
    }


def _row(runner: Runner, base: Runner) -> dict[str, Any]:
    own, theirs = runner.seconds[WARM_UP:], base.seconds[WARM_UP:]
    ratios = [a / b for a, b in zip(own, theirs, strict=True)]
    return {
        **runner.cell.identity(),
        "milliseconds": round(1e3 * statistics.median(own), 3),
        "milliseconds_80_percent": [round(1e3 * edge, 3) for edge in middle_80_percent(own)],
        "of_base": round(statistics.median(ratios), 3),
        "of_base_80_percent": [round(edge, 3) for edge in middle_80_percent(ratios)],
        "bytes": runner.bytes,
    }
