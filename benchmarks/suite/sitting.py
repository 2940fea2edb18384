"""A sitting: cells in processes of their own, several side by side, until all are done or it is time to stop."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.suite import records
from benchmarks.suite.cells import Cell
from benchmarks.suite.records import Saved
from subquad.runs.stop import StopRequest
from subquad.training.results import FILE

ROOT = Path(__file__).parents[2]
CHILD = [sys.executable, "-m", "benchmarks.suite.child"]
SAID = "said.txt"  # what the process of a cell wrote to standard error
PAUSE = 1.0  # seconds between two looks
PATIENCE = 300.0  # seconds that a cell may take to stop: it ends a step, or a scoring, and writes a checkpoint


@dataclass
class Sitting:
    """What is to be done, what is running, and what has been found.

    Args:
        out: a folder for each cell below it.
        path: results.json.
        minutes: after which nothing is started, and what runs is stopped.
        ended: told of each record, when it is written.
        show: told every so often.
    """

    cells: list[Cell]
    out: Path
    path: Path
    jobs: int
    data: str | None
    minutes: float | None
    ended: Callable[[Cell, Saved], None]
    show: Callable[[Sitting], None]
    running: dict[str, tuple[Cell, subprocess.Popen[bytes]]] = field(default_factory=dict)
    found: dict[str, Saved] = field(default_factory=dict)
    due: deque[Cell] = field(default_factory=deque)
    changed: list[Cell] = field(default_factory=list)  # with a record of other settings

    def read(self) -> None:
        """What results.json holds."""
        saved = records.read(self.path)
        for cell in self.cells:
            record = records.of(cell, saved)
            if record is not None:
                self.found[cell.name] = record
            elif cell.name in saved:
                self.changed.append(cell)
            if not records.is_final(record):
                self.due.append(cell)

    def collect(self) -> None:
        """What earlier sittings have left: in results.json, or, if they were killed just then, in the folders of cells."""
        self.read()
        if not self.path.exists():
            records.save(self.path, {})
        self.due = deque([cell for cell in self.due if not self._take(cell, records.FINAL)])

    def run(self) -> None:
        """Until all is done, or it is time to stop; after Ctrl-C or SIGTERM that ends in KeyboardInterrupt."""
        until = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        asked: float | None = None  # when they were asked to stop
        with StopRequest() as stop:
            try:
                while (self.due and asked is None) or self.running:
                    if asked is None and (stop.requested or (until is not None and time.monotonic() > until)):
                        asked = time.monotonic()
                        self._stop()
                    if asked is not None and time.monotonic() > asked + PATIENCE:
                        break
                    while self.due and asked is None and len(self.running) < self.jobs:
                        self._start(self.due.popleft())
                    for cell, process in list(self.running.values()):
                        if process.poll() is not None:
                            self._end(cell, process, was_asked=asked is not None)
                    self.show(self)
                    time.sleep(PAUSE)
            finally:  # the second Ctrl-C, or too long a wait
                self._abandon()
        if stop.requested:
            raise KeyboardInterrupt

    def done(self) -> int:
        """How many cells have ended for good."""
        return sum(records.is_final(self.found.get(cell.name)) for cell in self.cells)

    def progress(self, cell: Cell) -> tuple[int, int]:
        """The step at which a cell is, and how many there are; 0 of 0 before that is known."""
        found = records.trained(cell, self.out / cell.name)
        return (0, 0) if found is None else (found[1].step, found[1].steps or 0)

    def expected(self, cell: Cell) -> float:
        """Minutes that the whole cell takes: the median of those of its table that are done, or else the table's budget."""
        done = [self.found[c.name] for c in self.cells if c.table == cell.table and c.name in self.found]
        taken = [record["seconds"] / 60 for record in done if record["status"] == "done"]
        return statistics.median(taken) if taken else cell.minutes

    def left(self) -> float:
        """Minutes for all that is not done."""
        total = 0.0
        for cell in [*self.due, *(cell for cell, _ in self.running.values())]:
            step, steps = self.progress(cell)
            total += self.expected(cell) * (1 - step / steps if steps else 1)
        return total / self.jobs

    def _start(self, cell: Cell) -> None:
        folder = self.out / cell.name
        folder.mkdir(parents=True, exist_ok=True)
        is_other = (folder / FILE).exists() and records.trained(cell, folder) is None
        words = [*cell.command(), "--fresh" if is_other else "--resume", "--out", str(folder), "--json"]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "400"}  # wide: what it says is not cut into lines
        environment |= {} if self.data is None else {"SUBQUAD_DATA": self.data}
        with (folder / SAID).open("w") as said:
            process = subprocess.Popen(
                [*CHILD, *words],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, env=environment,
                start_new_session=True,  # Ctrl-C is for the suite
            )  # fmt: skip
        self.running[cell.name] = cell, process

    def _end(self, cell: Cell, process: subprocess.Popen[bytes], was_asked: bool) -> None:
        del self.running[cell.name]
        process.communicate()
        if not self._take(cell, (*records.FINAL, "failed")) and not was_asked:
            self._put(cell, records.failed(cell, _last_words(process.returncode, self.out / cell.name / SAID)))

    def _take(self, cell: Cell, ends: tuple[str, ...]) -> bool:
        """The record of a training, if that has come to one of these ends."""
        found = records.trained(cell, self.out / cell.name)
        if found is None or found[1].status not in ends:
            return False
        self._put(cell, records.made(cell, *found, self.jobs))
        return True

    def _put(self, cell: Cell, record: Saved) -> None:
        self.found[cell.name] = record
        records.merge(self.path, cell, record)
        self.ended(cell, record)

    def _stop(self) -> None:
        for _, process in self.running.values():
            process.terminate()

    def _abandon(self) -> None:
        """A second signal ends them at once; what does not hear it is killed."""
        self._stop()
        until = time.monotonic() + 10
        while time.monotonic() < until and any(process.poll() is None for _, process in self.running.values()):
            time.sleep(PAUSE)
        for _, process in self.running.values():
            process.kill()
            process.communicate()
        self.running.clear()


def _last_words(code: int, said: Path) -> str:
    text = " ".join(said.read_text(errors="replace").split())
    if code < 0:
        return f"the process was ended by signal {-code}"
    told = text.rpartition("error: ")[2] if "error: " in text else text[-300:]
    return told or f"the process ended with code {code}"
