"""The process that measures: what crashes it, or fills the memory, costs one cell.

It reads orders and writes answers, one JSON object a line. `Worker` is the side of the process that asks.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from subquad.bench.results import BASELINE, Setting


class WorkerError(Exception):
    """The worker died, or did not answer in time."""


class Worker:
    """A process to measure in; it is started again after it has died."""

    def __init__(self, setting: Setting, qkv: Path | None = None) -> None:
        self._command = [sys.executable, "-m", "subquad.bench.worker", json.dumps(asdict(setting)), str(qkv or "")]
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the worker may say something

    def ask(self, timeout: float, **order: Any) -> dict[str, Any]:
        """The answer to one order; raises WorkerError if there is none."""
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.stop()
            raise WorkerError(f"no answer within {timeout:.0f} s") from None
        except OSError:
            line = None
        if line is None:
            raise WorkerError(self._last_words())
        return dict(json.loads(line))

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _end(process)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.stop()
        self._said.close()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._answers = queue.Queue()
            pipe = subprocess.PIPE
            # A group of its own: Ctrl-C is for the process that asks.
            process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=self._said, text=True, start_new_session=True
            )
            threading.Thread(target=_collect, args=(process, self._answers), daemon=True).start()
            self._process = process
        return self._process

    def _last_words(self) -> str:
        assert self._process is not None
        code = _end(self._process)
        self._process = None
        if code == -9:
            return "the process was killed, most likely for want of memory"
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        return f"the process ended with code {code}" + (f": {lines[-1]}" if lines else "")


def _end(process: subprocess.Popen[str]) -> int:
    """Wait for the process, and close what was open to it."""
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written yet is for nobody
                pipe.close()
    return code


def _collect(process: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed meanwhile
        for line in process.stdout:
            answers.put(line)
    answers.put(None)


def serve(setting: Setting, qkv: Path | None) -> None:
    """Answer the orders on standard input."""
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    torch.set_num_threads(setting.threads)
    bench = _Bench(setting, qkv)
    orders: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    while True:
        order = json.loads(orders.get())
        try:
            answer = getattr(bench, order.pop("do"))(**order)
        except MemoryError:
            answer = {"failed": "out of memory"}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _listen(orders: queue.Queue[str]) -> None:
    """Pass orders on; when nobody is left to give any, end, whatever is going on."""
    for line in sys.stdin:
        orders.put(line)
    os._exit(0)


class _Bench:
    """What the worker can do; inputs and modules of one length are kept."""

    def __init__(self, setting: Setting, qkv: Path | None) -> None:
        from subquad.bench import measure

        self.measure, self.setting = measure, setting
        self.saved = None if qkv is None else measure.saved_inputs(qkv)
        self.length, self.inputs = -1, measure.inputs(setting, 1)
        self.runs: dict[tuple[str, str], Any] = {}
        self.exact: Any = None  # softmax's output

    def agree(self, method: str) -> dict[str, Any]:
        self.measure.require_agreement(method, self.setting)
        return {}

    def time(self, method: str, length: int, kind: Any) -> dict[str, Any]:
        return {"seconds": self.measure.seconds(self._run(method, length, kind), self.setting.device)}

    def facts(self, method: str, length: int) -> dict[str, Any]:
        """Peak bytes of a forward pass, and the errors of its output."""
        self._at(length)
        run = self.runs[method, "forward"] = self.measure.runner(method, self.setting, length, "forward", self.inputs)
        taken, found = self.measure.peak_bytes(run, self.setting.device)  # this warms up, too
        errors = {}
        if method == BASELINE:
            self.exact = found
        else:
            self.exact = self._run(BASELINE, length, "forward")() if self.exact is None else self.exact
            errors["random"] = self.measure.error(found, self.exact)
            real = None if self.saved is None else self.measure.saved_error(method, self.setting, length, self.saved)
            errors |= {} if real is None else {"real": real}
        return {"bytes": taken, "errors": errors}

    def _run(self, method: str, length: int, kind: Any) -> Callable[[], Any]:
        """What is timed, after a first call that warms up."""
        self._at(length)
        if (method, kind) not in self.runs:
            self.runs[method, kind] = self.measure.runner(method, self.setting, length, kind, self.inputs)
            self.runs[method, kind]()
        return self.runs[method, kind]

    def _at(self, length: int) -> None:
        if self.length != length:
            self.runs, self.exact = {}, None
            self.inputs = self.measure.inputs(self.setting, length)
            self.length = length


if __name__ == "__main__":
    serve(Setting(**json.loads(sys.argv[1])), Path(sys.argv[2]) if sys.argv[2] else None)
