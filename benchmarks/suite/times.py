"""How long a training step takes, and what it holds, beside that of the table's first row: in one process, in turns, on one
thread.

In every round each row of a table takes one step on the batch that a training would read then: forward, backward, clipping,
optimizer, as the trainings do them. Rows are shuffled anew in each round. A row's figures are the median over rounds, and the
median of its ratios to the first row in the same round; the intervals hold the middle 80 percent. What a training's own record
says of its steps was measured beside other work, and compares with nothing.

One more step of each, on the last batch, says what PyTorch has allocated at its peak, beyond weights and optimizer. Of that the
memory of a whole process says little: what was freed in pieces stays with it.
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

from benchmarks.common import machine, middle, write
from benchmarks.suite.cells import THREADS, Cell, Row, Table, made_with
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
WARM = 2  # rounds that do not count

Timed = dict[str, Any]  # a table's


def beside(results: Path) -> Path:
    """The file of the times that belong to these records."""
    return results.with_name("times.json")


def read(path: Path) -> dict[str, Timed]:
    """What was measured, by the name of the table."""
    found: dict[str, Timed] = read_results(path, SCHEMA, VERSION)["tables"] if path.exists() else {}
    return found


def merge(path: Path, table: Table, timed: Timed) -> None:
    """In the place of that table's times; the others stay."""
    tables = {**read(path), table.name: timed}
    write(path, {"schema": SCHEMA, "version": VERSION, "tables": dict(sorted(tables.items()))})


def of(row: Row, timed: Timed | None) -> dict[str, Any] | None:
    """The figures of that row, if they were measured with its settings."""
    found: dict[str, Any] | None = None if timed is None else timed["rows"].get(row.label)
    return found if found is not None and made_with(found) == row.cells[0].identity() else None


def is_measured(table: Table, timed: Timed | None, rounds: int) -> bool:
    """Whether there are so many rounds of every row, as it is declared now."""
    if timed is None or timed["rounds"] < rounds:
        return False
    return all(row.label in timed["left_out"] or of(row, timed) is not None for row in table.rows())


class Runner:
    """A row's model and optimizer, as `subquad train` makes them, and how long its steps took."""

    def __init__(self, cell: Cell, task: Task, splits: Splits, batches: Batches, folder: Path) -> None:
        self.cell, plan = cell, cell.plan
        self.seconds: list[float] = []
        self.bytes = 0  # at the peak of a step
        self.why = ""  # it takes no more steps
        job = Job(plan, task, splits, cell.config, folder, on_record=lambda record: None, is_stopping=lambda: False)
        torch.manual_seed(plan.settings.seed)
        model = task.model(cell.config, plan.settings)
        self.trainer = MethodTrainer(job, model, Record(cell.method), batches, PeakMemory(torch.device("cpu")))
        self.trainer.current_gradient_accumulation_steps = 1
        self.model, _ = self.trainer._prepare_for_training(batches.steps, self.trainer.get_train_dataloader(), None)

    def run(self, batch: Batch) -> None:
        """One more step."""
        try:
            self.seconds.append(self._step(batch))
        except Exception as error:  # a mechanism's own
            self.why = f"{type(error).__name__}: {error}".splitlines()[0]

    def weigh(self, batch: Batch) -> None:
        """One more step, for what it holds."""
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
    table: Table, rounds: int, data: str | None, command: str, show: Callable[[int, int], None] = lambda done, count: None
) -> Timed:
    """All rows of a table; what fails is left out, with the reason."""
    cells, settings, task = {row.label: row.cells[0] for row in table.rows()}, table.settings, find_task(table.task)
    shuffle = random.Random(settings.seed).shuffle
    with deterministic(THREADS), no_transformers_bars(), tempfile.TemporaryDirectory() as folder:
        splits = read_data(replace(next(iter(cells.values())).plan, data=data), task)
        rows, lengths = row_count(splits.train), row_lengths(splits.train)
        batches = Batches(rows, settings.batch, WARM + rounds, settings.seed, lengths=lengths)
        runners = {label: Runner(cell, task, splits, batches, Path(folder)) for label, cell in cells.items()}
        for done, batch in enumerate(loader(splits, batches), 1):
            order = [runner for runner in runners.values() if not runner.why]
            shuffle(order)
            for runner in order:
                runner.run(dict(batch))
            show(done, batches.steps)
        for runner in runners.values():
            if not runner.why:
                runner.weigh(dict(batch))
        where = machine()
    base, first = next(iter(runners.items()))
    if first.why:
        raise InputError(f"{table.name}: all rows are compared with {base}, which fails: {first.why}")
    return {
        "command": command,
        "machine": where,
        "rounds": rounds,
        "base": base,
        "rows": {label: _row(runner, first) for label, runner in runners.items() if not runner.why},
        "left_out": {label: runner.why for label, runner in runners.items() if runner.why},
    }


def _row(runner: Runner, base: Runner) -> dict[str, Any]:
    own, theirs = runner.seconds[WARM:], base.seconds[WARM:]
    ratios = [a / b for a, b in zip(own, theirs, strict=True)]
    return {
        **runner.cell.identity(),
        "milliseconds": round(1e3 * statistics.median(own), 3),
        "milliseconds_80_percent": [round(1e3 * edge, 3) for edge in middle(own)],
        "of_base": round(statistics.median(ratios), 3),
        "of_base_80_percent": [round(edge, 3) for edge in middle(ratios)],
        "bytes": runner.bytes,
    }
