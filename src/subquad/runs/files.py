"""Files that are never half written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """To a temporary file beside `path`, then renamed: whoever reads sees the old file or the new one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        with suppress(OSError):
            unfinished.unlink()
