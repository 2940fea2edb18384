"""Atomic file writes that survive a crash: a reader sees the old file or the new one, never half of one."""

from __future__ import annotations

import errno
import glob
import os
import secrets
from contextlib import suppress
from pathlib import Path

_UNFINISHED = ".unfinished"  # the suffix of files that are being written


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file beside `path`, flush it to the disk and rename it.

    The temporary file has a random name and must not exist yet, so nobody can plant one. The permissions are those of the file
    that is replaced; if there is none, the default for new files. On failure the old file is kept, and nothing else is left
    behind.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_UNFINISHED}")
    try:
        with unfinished.open("xb") as file:
            with suppress(FileNotFoundError):
                unfinished.chmod(path.stat().st_mode & 0o777)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with suppress(OSError):
            unfinished.unlink()
    flush(path.parent)


def remove_unfinished(path: Path) -> None:
    """Remove the temporary files that killed processes left when writing `path`; no process may be writing it now."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{_UNFINISHED}"):
        with suppress(OSError):
            left.unlink()


def flush(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, has reached the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot flush folders
            raise
    finally:
        os.close(number)
