"""One writer at a time in the folder of a run."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from subquad.errors import SubquadError
from subquad.runs.results_file import ResultsError

LOCK = ".lock"


@contextlib.contextmanager
def exclusive(folder: Path, what: str) -> Iterator[int | None]:
    """Hold the lock of `folder`, so that no other process writes to it; `what` names the run in the error message.

    Yields the lock's file descriptor: a worker that inherits it also keeps the folder locked, until the worker ends. A file
    system error in the folder, such as a missing permission or a full disk, becomes a `ResultsError`.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix system
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _open(folder / LOCK)
    except OSError as error:
        why = error.strerror or error
        raise ResultsError(f"the results cannot be written to {folder}: {why}. Choose another folder.") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it ends
        except OSError:
            raise ResultsError(f"another {what} is writing to {folder}. Wait for it, or choose another --out.") from None
        yield descriptor
    except OSError as error:
        if isinstance(error, SubquadError) or not _is_inside(error.filename, folder):
            raise
        raise ResultsError(
            f"{error.filename} cannot be read or written: {error.strerror}. What was saved before is intact. Check the "
            "permissions of the folder and the free space on its disk, then resume."
        ) from error
    finally:
        os.close(descriptor)


def _is_inside(name: object, folder: Path) -> bool:
    return isinstance(name, str) and Path(name).absolute().is_relative_to(folder.absolute())


def _open(path: Path) -> int:
    """Open a lock file. Its content is never read or changed, because it may be a hard link to someone else's file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError:
        if path.is_symlink():
            raise _not_a_file(path, "a symbolic link") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_file(path, "a device or a pipe")
    return descriptor


def _not_a_file(path: Path, got: str) -> ResultsError:
    return ResultsError(f"the lock of a run, {path}, must be a regular file; got {got}. Remove it, or choose another folder.")
