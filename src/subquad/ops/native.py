"""Compiled loops for CPUs, where they were built for this one; everything runs without them, too.

The build tries to compile the sources in this folder for each kind of vector that a processor may have, and goes on without
what fails. `library` loads the one for this processor. Engines keep their PyTorch code as the fallback and as the oracle of
the tests: `disabled` turns to it, as does the environment variable SUBQUAD_NATIVE=0.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad

_SOURCES = Path(__file__).parents[3] / "csrc"  # in a checkout; an installed wheel has none
_is_enabled = os.environ.get("SUBQUAD_NATIVE", "1") != "0"


@contextmanager
def disabled() -> Iterator[None]:
    """Without the compiled loops."""
    global _is_enabled
    before, _is_enabled = _is_enabled, False
    try:
        yield
    finally:
        _is_enabled = before


@cache
def library() -> ctypes.CDLL | None:
    """The loops for this processor, or None."""
    path = Path(__file__).with_name(f"kernels.{torch.backends.cpu.get_cpu_capability().lower()}.so")
    try:
        found = ctypes.CDLL(str(path))
    except OSError:  # not built, or for another machine
        return None
    found.subquad_sources.restype = ctypes.c_char_p
    if _SOURCES.is_dir() and found.subquad_sources().decode() != _fingerprint():
        warnings.warn(
            f"{path.name} was compiled from other sources than those in csrc, so subquad falls back to PyTorch, "
            "which is slower. Compile it again: pip install --editable .",
            stacklevel=2,
        )
        return None
    return found


def _fingerprint() -> str:
    """Of the C++ sources, as the build computes it."""
    sources = sorted(path for ending in ("*.cpp", "*.h") for path in _SOURCES.rglob(ending))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def can_take(*tensors: Tensor | None) -> bool:
    """Whether the loops may do the work on these tensors."""
    return _is_enabled and all(t is None or is_plain(t) for t in tensors) and library() is not None


def is_plain(x: Tensor) -> bool:
    """Whether `x` has memory to read and write: on the CPU, and nobody traces or transforms what happens to it."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type == "cpu"
        and not torch._C._len_torch_dispatch_stack()  # fake tensors, export, counters of operations
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )
