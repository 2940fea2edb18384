"""The library of compiled CPU kernels: C++ from csrc/, compiled when the package is built, once per kind of processor.

The build skips what it cannot compile, and subquad then runs on its PyTorch fallbacks; `dispatch` chooses between the two. A
library is used only if it was compiled from the sources that are here, and if its structures have the layout that Python gives
them.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

_FOLDER = Path(__file__).parent
_SOURCES = Path(__file__).parents[3] / "csrc"  # exists in a checkout, not in an installed wheel
_MIRRORED: dict[str, type[ctypes.Structure]] = {}
_COMPILE = "Compile it again: pip install --editable ."
_Structure = TypeVar("_Structure", bound=type[ctypes.Structure])


class Search(NamedTuple):
    """What was found: the library and its file, and what is wrong with files that cannot be used."""

    library: ctypes.CDLL | None
    path: Path | None
    problems: tuple[str, ...]


def mirrored(structure: _Structure) -> _Structure:
    """The class, which has the name and the fields of a C structure; its layout is compared when the library is loaded."""
    name = structure.__name__
    if name in _MIRRORED:
        raise ValueError(f"two classes mirror the C structure {name}; name each like the structure that it mirrors.")
    _MIRRORED[name] = structure
    return structure


def kinds() -> tuple[str, ...]:
    """The kinds of kernels that this processor can run, the fastest first; hatch_build.py compiles them."""
    machine, capability = platform.machine().lower(), torch.backends.cpu.get_cpu_capability()
    if machine in ("x86_64", "amd64"):
        return {"AVX512": ("avx512", "avx2"), "AVX2": ("avx2",)}.get(capability, ())
    # Every 64-bit ARM processor has NEON, whatever PyTorch calls it: DEFAULT, or SVE256 and the like.
    return ("neon",) if machine in ("arm64", "aarch64") else ()


@cache
def load() -> ctypes.CDLL | None:
    """The library for this processor; None if there is none, or none that fits these sources."""
    found = search()
    if found.problems:
        instead = "falls back to PyTorch, which is slower" if found.path is None else f"uses {found.path.name}"
        warnings.warn(f"{'; '.join(found.problems)}, so subquad {instead}. {_COMPILE}", stacklevel=2)
    return found.library


def search() -> Search:
    """The first library that can be used, of those for this processor."""
    problems: list[str] = []
    for kind in kinds():
        path = _FOLDER / f"kernels.{kind}.so"
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            problems.append(f"{path.name} cannot be loaded ({error})")
            continue
        if problem := _mismatch(library):
            problems.append(f"{path.name} {problem}")
            continue
        return Search(library, path, tuple(problems))
    return Search(None, None, tuple(problems))


def why_missing() -> str:
    """Why there are no compiled kernels; empty if there are."""
    return "" if load() is not None else _reason()


# As torch.compiler.assume_constant_result does, without its import of the compiler: traced calls take the result as a constant.
why_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _reason() -> str:
    if problems := search().problems:
        return f"{'; '.join(problems)}. {_COMPILE}"
    processor = f"this processor ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    if not kinds():
        return f"subquad has no compiled kernels for {processor}"
    return f"there are no compiled kernels for {processor}; compile them: pip install --editable ."


def _mismatch(library: ctypes.CDLL) -> str:
    """How the library differs from the sources and structures that are here; empty if it does not."""
    try:
        library.subquad_sources.restype = ctypes.c_char_p
        if _SOURCES.is_dir() and library.subquad_sources().decode() != _fingerprint(_SOURCES):
            return "was compiled from other sources than those in csrc"
        for name, structure in _MIRRORED.items():
            theirs, ours = _layout_in(library, name), _layout_of(structure)
            if theirs != ours:
                field = next(field for field in (*ours, *theirs) if ours.get(field) != theirs.get(field))
                return f"has another layout of the structure {name}: {field or 'its size'} differs"
    except AttributeError as error:  # a symbol that it does not have
        return f"is not a library of these kernels ({error})"
    return ""


class _Field(ctypes.Structure):
    """struct Field of csrc/common/layout.h."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_int64), ("size", ctypes.c_int64))


def _layout_in(library: ctypes.CDLL, name: str) -> dict[str, tuple[int, int]]:
    """Offset and size of every field, by name; under "" the size of the structure."""
    function = getattr(library, f"subquad_layout_{name}")
    function.restype = ctypes.POINTER(_Field)
    found, fields = {}, function()
    for number in range(1000):
        field = fields[number]
        found[(field.name or b"").decode()] = (field.offset, field.size)
        if not field.name:
            break
    return found


def _layout_of(structure: type[ctypes.Structure]) -> dict[str, tuple[int, int]]:
    """The same, as Python has it."""
    names = [field[0] for field in structure._fields_]
    found = {name: (getattr(structure, name).offset, getattr(structure, name).size) for name in names}
    return {**found, "": (ctypes.sizeof(structure), 0)}


def _fingerprint(folder: Path) -> str:
    """A hash of the C++ sources; hatch_build.py computes the same one and compiles it into the library."""
    sources = sorted(path for ending in ("*.cpp", "*.h") for path in folder.rglob(ending))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
