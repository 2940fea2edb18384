"""Worker processes: a crash, or running out of memory, loses only the work of one process.

Messages are JSON objects, one per line: to the worker on its standard input, back on its standard output. `Worker` is the side
of the process that starts it, `Connection` that of the worker. A worker has a session of its own, so that Ctrl-C reaches only
the process that started it, and it ends when that process does.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import IO, Any

# With -c Python looks for modules in the working folder first. A worker looks there only if this process does: its files may be
# anybody's.
_SAME_PATH = "import sys; sys.path[:] = filter(None, sys.path)"
KILLED = "the process was killed, most likely because memory ran out"


class Worker:
    """A new process that calls `function`, given as "module:name", which must open a `Connection`.

    Args:
        log: where its standard error goes, with all that libraries print.
        environment: variables to set, beside those of this process.
        lock: a file descriptor that it inherits, see `subquad.runs.lock`.
    """

    def __init__(
        self, function: str, log: IO[str], *, environment: Mapping[str, str] | None = None, lock: int | None = None
    ) -> None:
        module, _, name = function.partition(":")
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{_SAME_PATH}; from {module} import {name}; {name}()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), **(environment or {})},
            pass_fds=() if lock is None else (lock,),
            start_new_session=True,
        )
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError if the worker has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next message, or None once the worker has ended; TimeoutError after `timeout` seconds without either."""
        try:
            message = self._messages.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no answer within {timeout:.0f} s") from None
        if message is None:
            self._messages.put(None)
        return message

    def messages(self) -> Iterator[dict[str, Any]]:
        """All messages until the worker ends."""
        while (message := self.receive()) is not None:
            yield message

    def request_stop(self) -> None:
        """Send SIGTERM, which `StopRequest` catches in the worker."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait until it has ended, and return its exit code."""
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what is still in the pipe has no reader
                    pipe.close()
        return code

    def kill(self) -> None:
        """End it at once, if it is still running."""
        if self._process.poll() is None:
            self._process.kill()
        self.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # the pipe was closed, or the worker was killed in the middle of a line
            for line in self._process.stdout:
                self._messages.put(json.loads(line))
        self._messages.put(None)


def why_ended(code: int, log: str) -> str:
    """Why a worker ended early: its exit code, and the last line of what it logged."""
    if code == -signal.SIGKILL:
        return KILLED
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f"the process ended with code {code}" + (f": {lines[-1]}" if lines else "")


class Connection:
    """The worker's side. From now on what libraries print goes to standard error, and the process ends with its parent."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self) -> dict[str, Any]:
        """The next message; waits for it."""
        return self._messages.get()

    def send(self, message: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def _read(self) -> None:
        for line in sys.stdin:
            self._messages.put(json.loads(line))
        os._exit(0)  # the process that started this one is gone
