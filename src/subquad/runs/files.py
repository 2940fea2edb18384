"""Atomic file writes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file beside `path` and rename it: a reader sees the old file or the new one, never half of one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        with suppress(OSError):
            unfinished.unlink()
