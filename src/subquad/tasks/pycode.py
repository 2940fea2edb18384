"""`pycode`: the bytes of the Python standard library's own sources, the next from those before it.

The files lie where Python is installed, so figures of two Python versions do not compare.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import ClassVar

from subquad.tasks.base import Settings, Splits, TaskInfo
from subquad.tasks.language import ByteModel, byte_ids
from subquad.tasks.source import DataError

EVERY = 20  # one file in so many is held out to choose by, and one to report
HELD_OUT = 250_000  # bytes of those, at most
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "lib2to3", "idlelib"}  # not installed everywhere


class PyCode(ByteModel):
    """Bits per byte of Python code. Files in the order of their paths; whole files are held out."""

    info: ClassVar[TaskInfo] = TaskInfo(
        name="pycode",
        idea="bytes of the Python standard library's sources, language modelling",
        kind="causal",
        metric="bits_per_byte",
        higher_is_better=False,
        source="",
        folder="",
        defaults=Settings(length=256, layers=4, dim=128, heads=4, batch=16, lr=3e-3, steps=600),
        options={},
    )

    def load(self, folder: Path | None, settings: Settings) -> Splits:
        texts = [path.read_bytes() for path in sources(Path(sysconfig.get_paths()["stdlib"]))]
        held_out = [b"\n".join(texts[first::EVERY])[:HELD_OUT] for first in (EVERY // 2, EVERY - 1)]
        train = b"\n".join(text for i, text in enumerate(texts) if i % EVERY not in (EVERY // 2, EVERY - 1))
        return self.splits(byte_ids(train), byte_ids(held_out[0]), byte_ids(held_out[1]), settings)


def sources(library: Path) -> list[Path]:
    """Every .py file of the library, but for tests and what is installed beside it."""
    inside = ((path, path.relative_to(library)) for path in library.rglob("*.py"))
    found = sorted((name.as_posix(), path) for path, name in inside if not SKIPPED.intersection(name.parts))
    if not found:
        raise DataError(
            f"pycode reads the sources of Python's standard library; {library} has none. Install them, or another task."
        )
    return [path for _, path in found]
