"""One writer at a time in the folder of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from subquad.runs.results_file import ResultsError


@contextlib.contextmanager
def exclusive(folder: Path, what: str) -> Iterator[int | None]:
    """Hold the lock of `folder`, so that no other process writes to it; `what` names the run in the error message.

    Yields the lock's file descriptor: a worker that inherits it keeps the folder locked until it ends, too.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix system
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        why = error.strerror or error
        raise ResultsError(f"the results cannot be written to {folder}: {why}. Choose another folder.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, in whatever way
        except OSError:
            raise ResultsError(f"another {what} is writing to {folder}. Wait for it, or choose another --out.") from None
        yield lock.fileno()
