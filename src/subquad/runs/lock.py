"""One writer at a time in the folder of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from subquad.runs.results_file import ResultsError


@contextlib.contextmanager
def alone(folder: Path, doing: str = "comparison") -> Iterator[int | None]:
    """While nobody else writes into `folder`: two would overwrite and disturb each other.

    Gives the lock's file descriptor: a process that inherits it keeps the folder until it ends, too.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix
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
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it ends with the process, however that ends
        except OSError:
            raise ResultsError(f"another {doing} is writing to {folder}. Wait for it, or choose another --out.") from None
        yield lock.fileno()
