"""The process that measures, so that a crash or running out of memory loses only one cell.

`Bench` runs in the worker; `MeasuringWorker` is the side of the process that sends requests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from subquad.bench.results import BASELINE, Setting
from subquad.registry import load_module, module_of, resolve
from subquad.runs.worker import Connection, Worker, why_ended


class WorkerError(Exception):
    """The worker ended, or did not answer in time."""


class MeasuringWorker:
    """A process to measure in; it is started when it is needed, and again after it has ended."""

    def __init__(self, setting: Setting, qkv: Path | None = None) -> None:
        self._settings = {"setting": asdict(setting), "qkv": None if qkv is None else str(qkv)}
        self._worker: Worker | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the worker may write to it

    def ask(self, timeout: float, do: str, method: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request, which names a method of `Bench`; WorkerError if there is none."""
        module = None if method == BASELINE else module_of(resolve(method))
        worker = self._started()
        try:
            worker.send({"do": do, "module": module, "method": method, **arguments})
            answer = worker.receive(timeout)
        except TimeoutError as error:
            self.stop()
            raise WorkerError(str(error)) from None
        except OSError:
            answer = None
        if answer is None:
            self._worker = None
            code = worker.wait()
            self._log.seek(0)
            raise WorkerError(why_ended(code, self._log.read()))
        return answer

    def stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def __enter__(self) -> MeasuringWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.stop()
        self._log.close()

    def _started(self) -> Worker:
        if self._worker is None:
            self._worker = Worker("subquad.bench.worker:main", self._log)
            self._worker.send(self._settings)
        return self._worker


def main() -> None:
    """In the worker: answer requests until the process that sends them ends."""
    import torch

    connection = Connection()
    settings = connection.receive()
    setting = Setting(**settings["setting"])
    torch.set_num_threads(setting.threads)
    bench = Bench(setting, None if settings["qkv"] is None else Path(settings["qkv"]))
    while True:
        order = connection.receive()
        do, module = order.pop("do"), order.pop("module")
        try:
            if module is not None:
                load_module(module)
            answer = getattr(bench, do)(**order)
        except MemoryError:
            answer = {"failed": "out of memory"}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        connection.send(answer)


class Bench:
    """The measurements that a worker makes. It keeps the inputs and modules of one length."""

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
        peak, found = self.measure.peak_bytes(run, self.setting.device)  # this warms up, too
        errors = {}
        if method == BASELINE:
            self.exact = found
        else:
            self.exact = self._run(BASELINE, length, "forward")() if self.exact is None else self.exact
            errors["random"] = self.measure.error(found, self.exact)
            real = None if self.saved is None else self.measure.saved_error(method, self.setting, length, self.saved)
            errors |= {} if real is None else {"real": real}
        return {"bytes": peak, "errors": errors}

    def _run(self, method: str, length: int, kind: Any) -> Callable[[], Any]:
        """The call to time, after a first one that warms up."""
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
