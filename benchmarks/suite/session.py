"""One start of the suite: cells in worker processes, several in parallel, until all are done or time is up."""

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
WORKER = [sys.executable, "-m", "benchmarks.suite.worker"]
LOG = "log.txt"  # the standard error of a cell's process
POLL_INTERVAL = 1.0  # seconds
STOP_TIMEOUT = 300.0  # seconds for a cell to finish its step or evaluation, and to write a checkpoint


@dataclass
class Session:
    """The cells to train, those that are running, and the records so far.

    Args:
        out: has a folder for each cell.
        path: results.json.
        minutes: after which running cells are stopped.
        on_record: called when a record is written.
        on_progress: called repeatedly while cells are running.
    """

    cells: list[Cell]
    out: Path
    path: Path
    jobs: int
    data: str | None
    minutes: float | None
    on_record: Callable[[Cell, Saved], None]
    on_progress: Callable[[Session], None]
    running: dict[str, tuple[Cell, subprocess.Popen[bytes]]] = field(default_factory=dict)
    found: dict[str, Saved] = field(default_factory=dict)
    due: deque[Cell] = field(default_factory=deque)
    changed: list[Cell] = field(default_factory=list)  # whose record has other settings

    def read(self) -> None:
        """Read results.json."""
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
        """Collect the records of earlier sessions from results.json, or from the folders of cells if one was killed before."""
        self.read()
        if not self.path.exists():
            records.save(self.path, {})
        self.due = deque([cell for cell in self.due if not self._take(cell, records.FINAL)])

    def run(self) -> None:
        """Run until all cells are done or time is up; raises KeyboardInterrupt after Ctrl-C or SIGTERM."""
        until = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        stopped_at: float | None = None  # when the stop signal was sent
        with StopRequest() as stop:
            try:
                while (self.due and stopped_at is None) or self.running:
                    if stopped_at is None and (stop.requested or (until is not None and time.monotonic() > until)):
                        stopped_at = time.monotonic()
                        self._stop()
                    if stopped_at is not None and time.monotonic() > stopped_at + STOP_TIMEOUT:
                        break
                    while self.due and stopped_at is None and len(self.running) < self.jobs:
                        self._start(self.due.popleft())
                    for cell, process in list(self.running.values()):
                        if process.poll() is not None:
                            self._end(cell, process, was_stopped=stopped_at is not None)
                    self.on_progress(self)
                    time.sleep(POLL_INTERVAL)
            finally:  # after a second Ctrl-C, or the timeout
                self._abandon()
        if stop.requested:
            raise KeyboardInterrupt

    def done(self) -> int:
        """How many cells need not be run again."""
        return sum(records.is_final(self.found.get(cell.name)) for cell in self.cells)

    def progress(self, cell: Cell) -> tuple[int, int]:
        """Steps done and steps in all of a cell; 0 and 0 before they are known."""
        found = records.trained(cell, self.out / cell.name)
        return (0, 0) if found is None else (found[1].step, found[1].steps or 0)

    def expected(self, cell: Cell) -> float:
        """Minutes for the whole cell: the median of the finished cells of its table, or else what the table declares."""
        done = [self.found[c.name] for c in self.cells if c.table == cell.table and c.name in self.found]
        taken = [record["seconds"] / 60 for record in done if record["status"] == "done"]
        return statistics.median(taken) if taken else cell.minutes

    def minutes_left(self) -> float:
        """Minutes until all cells are done."""
        total = 0.0
        for cell in [*self.due, *(cell for cell, _ in self.running.values())]:
            step, steps = self.progress(cell)
            total += self.expected(cell) * (1 - step / steps if steps else 1)
        return total / self.jobs

    def _start(self, cell: Cell) -> None:
        folder = self.out / cell.name
        folder.mkdir(parents=True, exist_ok=True)
        has_other_settings = (folder / FILE).exists() and records.trained(cell, folder) is None
        words = [*cell.command(), "--fresh" if has_other_settings else "--resume", "--out", str(folder), "--json"]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "400"}  # wide, so that messages are not wrapped
        environment |= {} if self.data is None else {"SUBQUAD_DATA": self.data}
        with (folder / LOG).open("w") as log:
            process = subprocess.Popen(
                [*WORKER, *words],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, env=environment,
                start_new_session=True,  # Ctrl-C is for the suite
            )  # fmt: skip
        self.running[cell.name] = cell, process

    def _end(self, cell: Cell, process: subprocess.Popen[bytes], was_stopped: bool) -> None:
        del self.running[cell.name]
        process.communicate()
        if not self._take(cell, (*records.FINAL, "failed")) and not was_stopped:
            self._put(cell, records.failed(cell, _why_ended(process.returncode, self.out / cell.name / LOG)))

    def _take(self, cell: Cell, ends: tuple[str, ...]) -> bool:
        """Take over the record of a training run if it has one of these statuses."""
        found = records.trained(cell, self.out / cell.name)
        if found is None or found[1].status not in ends:
            return False
        self._put(cell, records.made(cell, *found, self.jobs))
        return True

    def _put(self, cell: Cell, record: Saved) -> None:
        self.found[cell.name] = record
        records.merge(self.path, cell, record)
        self.on_record(cell, record)

    def _stop(self) -> None:
        for _, process in self.running.values():
            process.terminate()

    def _abandon(self) -> None:
        """Send a second signal, which ends a cell at once; kill those that do not react."""
        self._stop()
        until = time.monotonic() + 10
        while time.monotonic() < until and any(process.poll() is None for _, process in self.running.values()):
            time.sleep(POLL_INTERVAL)
        for _, process in self.running.values():
            process.kill()
            process.communicate()
        self.running.clear()


def _why_ended(code: int, log: Path) -> str:
    text = " ".join(log.read_text(errors="replace").split())
    if code < 0:
        return f"the process was ended by signal {-code}"
    message = text.rpartition("error: ")[2] if "error: " in text else text[-300:]
    return message or f"the process ended with code {code}"
