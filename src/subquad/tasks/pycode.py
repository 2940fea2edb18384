"""`pycode`: language modelling over the bytes of the Python standard library's sources.

The files are those of the installed Python, so figures of different Python versions cannot be compared.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import ClassVar

from subquad.tasks.base import Settings, Splits, TaskInfo
from subquad.tasks.language import ByteModel, byte_ids
from subquad.tasks.source import DataError

EVERY = 20  # one file in 20 is held out for validation, and another for testing
HELD_OUT = 250_000  # maximum bytes of either
SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "__pycache__",
    "lib2to3",
    "idlelib",
}  # not in every Python


class PyCode(ByteModel):
    """Bits per byte of Python code. Files are sorted by path, and whole files are held out."""

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
    """Every .py file of the library, without tests and installed packages."""
    inside = ((path, path.relative_to(library)) for path in library.rglob("*.py"))
    found = sorted((name.as_posix(), path) for path, name in inside if not SKIPPED.intersection(name.parts))
    if not found:
        raise DataError(
            f"pycode needs the sources of Python's standard library; {library} has none. Install them, or choose another task."
        )
    return [path for _, path in found]
