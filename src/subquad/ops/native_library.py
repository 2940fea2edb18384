"""The library of compiled CPU kernels: C++ from csrc/, compiled when the package is built, once per kind of processor.

The build skips what it cannot compile, and subquad then runs on its PyTorch fallbacks; `dispatch` chooses between the two.
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from functools import cache
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_SOURCES = Path(__file__).parents[3] / "csrc"  # exists in a checkout, not in an installed wheel


@cache
def load() -> ctypes.CDLL | None:
    """The library for this processor; None if there is none, or if it was compiled from other sources than those in csrc/."""
    path = _FOLDER / f"kernels.{torch.backends.cpu.get_cpu_capability().lower()}.so"
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # not built, or built for another machine
        return None
    library.subquad_sources.restype = ctypes.c_char_p
    if _SOURCES.is_dir() and library.subquad_sources().decode() != _fingerprint(_SOURCES):
        warnings.warn(
            f"{path.name} was compiled from other sources than those in csrc, so subquad falls back to PyTorch, "
            "which is slower. Compile it again: pip install --editable .",
            stacklevel=2,
        )
        return None
    return library


def why_missing() -> str:
    """Why there are no compiled kernels; empty if there are."""
    if load() is not None:
        return ""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"there are no compiled kernels for this processor ({capability}); compile them: pip install --editable ."


# As torch.compiler.assume_constant_result does, without its import of the compiler: traced calls take the result as a constant.
why_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fingerprint(folder: Path) -> str:
    """A hash of the C++ sources; hatch_build.py computes the same one and compiles it into the library."""
    sources = sorted(path for ending in ("*.cpp", "*.h") for path in folder.rglob(ending))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
