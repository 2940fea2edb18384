"""A run of one part: hands its cases to worker processes, and records how each ends. A worker that dies is a finding, not the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from subquad.runs.machine import describe_machine
from subquad.runs.stop import StopRequest
from subquad.runs.worker import Worker, why_ended
from tests.soak import FINDINGS, PARTS
from tests.soak import progress as records
from tests.soak.progress import SHRUNK, PartProgress

SAVE_EVERY = 5.0  # seconds; a kill repeats the cases since
START_SECONDS = 300.0  # for a worker's imports
SHRINK_SECONDS = 300.0
LOG_TAIL = 6000  # characters of a dead worker's log


@dataclass(frozen=True)
class Settings:
    part: str
    seed: int
    out: Path
    cases: int
    deadline: float = float("inf")  # time.monotonic()
    workers: int = 1
    retries: bool = False  # run the cases of earlier findings again, first
    module: str | None = None  # in place of the part's own, for tests of this harness

    @property
    def folder(self) -> Path:
        return self.out / f"{self.part}-seed-{self.seed}"


class Slot:
    """A worker, started again whenever it has died."""

    def __init__(self, settings: Settings, environment: dict[str, str], name: str) -> None:
        self.settings, self.environment = settings, environment
        self.log = settings.folder / f"worker-{name}.log"
        self._worker: Worker | None = None

    def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any] | str:
        """The worker's answer; or, where there is none, why."""
        if isinstance(worker := self._ready(), str):
            return worker
        try:
            worker.send(message)
            answer = worker.receive(timeout=seconds)
        except TimeoutError:
            self.end()
            return f"no end within {seconds:.0f} s"
        except OSError:
            answer = None
        if answer is not None:
            return answer
        return self._why()

    def _ready(self) -> Worker | str:
        if self._worker is not None:
            return self._worker
        with self.log.open("w") as log:
            environment = {"OMP_NUM_THREADS": "1", **self.environment}
            self._worker = Worker("tests.soak.worker:main", log, environment=environment)
        settings = self.settings
        first = {"part": settings.part, "seed": settings.seed, "folder": str(settings.folder), "module": settings.module}
        try:
            self._worker.send(first)
            if self._worker.receive(timeout=START_SECONDS) is not None:
                return self._worker
        except TimeoutError:
            self.end()
            return "the worker did not start"
        except OSError:
            pass
        return self._why()

    def _why(self) -> str:
        assert self._worker is not None
        code, self._worker = self._worker.wait(), None
        log = self.log.read_text(errors="replace")
        return f"{why_ended(code, log)}\n{log[-LOG_TAIL:]}".strip()

    def end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


def run_part(settings: Settings, on_result: Callable[[PartProgress], object] = lambda _: None) -> PartProgress:
    """Run the cases that are left, until all are done, the time is over, or Ctrl-C."""
    module = import_module(settings.module or PARTS[settings.part])
    settings.folder.mkdir(parents=True, exist_ok=True)
    progress = records.load(settings.out, settings.part, settings.seed)
    commit = describe_machine()["commit"]
    progress.commits = [*(c for c in progress.commits if c != commit), commit]
    environment = module.environment(settings.part, settings.out) if hasattr(module, "environment") else {}
    run = _Run(settings, module, environment, progress, on_result)
    if settings.retries:
        run.retry()
    run.run()
    return progress


def run_one(settings: Settings, index: int) -> dict[str, Any]:
    """One case in a worker of its own, without a record of it; a finding is shrunk."""
    module = import_module(settings.module or PARTS[settings.part])
    settings.folder.mkdir(parents=True, exist_ok=True)
    environment = module.environment(settings.part, settings.out) if hasattr(module, "environment") else {}
    return _Run(settings, module, environment, PartProgress(settings.part, settings.seed)).case(
        index, Slot(settings, environment, f"only-{index}"), is_alone=True
    )


class _Run:
    def __init__(self, settings, module, environment, progress, on_result=lambda _: None) -> None:
        self.settings, self.module, self.environment = settings, module, environment
        self.progress, self.on_result = progress, on_result
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.taken: set[int] = set()
        self.saved = time.monotonic()

    def run(self) -> None:
        threads = [threading.Thread(target=self._work, args=(str(n),)) for n in range(self.settings.workers)]
        for thread in threads:
            thread.start()
        with StopRequest() as request:
            request.on_request = self.stop.set
            try:
                while any(thread.is_alive() for thread in threads):
                    time.sleep(0.1)
            finally:
                self.stop.set()
                for thread in threads:
                    thread.join()
                self.progress.was_stopped = request.requested
                records.save(self.settings.out, self.progress)

    def retry(self) -> None:
        """Run the cases of all findings again, and keep what they find now."""
        slot = Slot(self.settings, self.environment, "retry")
        for finding in list(self.progress.findings):
            start = time.monotonic()
            result = self.case(finding["index"], slot)
            self.progress.forget(finding)
            self.progress.add(finding["index"], result, time.monotonic() - start)
        slot.end()

    def _work(self, name: str) -> None:
        slot = Slot(self.settings, self.environment, name)
        try:
            while (index := self._take()) is not None:
                start = time.monotonic()
                result = self.case(index, slot)
                with self.lock:
                    self.progress.add(index, result, time.monotonic() - start)
                    self._save_now_and_then()
                    self.on_result(self.progress)
        finally:
            slot.end()

    def _take(self) -> int | None:
        with self.lock:
            if self.stop.is_set() or time.monotonic() > self.settings.deadline:
                return None
            index = self.progress.following
            while index in self.progress.ahead or index in self.taken:
                index += 1
            self.taken = {n for n in self.taken if n >= self.progress.following} | {index}
            return index if index < self.settings.cases else None

    def case(self, index: int, slot: Slot, *, is_alone: bool = False) -> dict[str, Any]:
        """The result of a case; a finding is shrunk unless there are enough of its class."""
        seconds = getattr(self.module, "SECONDS", 120)
        answer = slot.ask({"index": index}, seconds)
        if is_alone:
            slot.end()
        if isinstance(answer, str):
            drawn = self.module.explain(self.settings.seed, index) if hasattr(self.module, "explain") else {}
            labels = {**drawn.get("labels", {}), "check": "process"}
            answer = {"verdict": "crash", "error": answer, "reproduction": drawn.get("reproduction", ""), "labels": labels}
        if answer["verdict"] not in FINDINGS:
            return answer
        answer["command"] = f"python -m tests.soak --part {self.settings.part} --seed {self.settings.seed} --only {index}"
        with self.lock:
            is_new = self.progress.alike(answer) < SHRUNK
        return self._shrink(index, answer) if is_new and hasattr(self.module, "shrink") else answer

    def _shrink(self, index: int, answer: dict[str, Any]) -> dict[str, Any]:
        slot = Slot(self.settings, self.environment, f"shrink-{index}")
        try:
            found = slot.ask({"index": index, "shrink": True}, SHRINK_SECONDS)
        finally:
            slot.end()
        if isinstance(found, dict) and found.get("reproduction"):
            return {**answer, "reproduction": found["reproduction"]}
        why = found if isinstance(found, str) else found.get("failure", "nothing smaller fails")
        return {**answer, "not_shrunk": why}

    def _save_now_and_then(self) -> None:
        if time.monotonic() - self.saved > SAVE_EVERY:
            records.save(self.settings.out, self.progress)
            self.saved = time.monotonic()
