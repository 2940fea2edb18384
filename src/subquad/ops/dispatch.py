"""Chooses between compiled kernels and plain PyTorch, and records why.

Every engine can compute everything in PyTorch. The kernelized engine calls an operator unless there is a reason not to
(`choose`); the others call their kernels directly (`can_use_compiled`). `disabled`, or the environment variable
SUBQUAD_NATIVE=0, turns the kernels off. `recorded` lists what `choose` decided.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from subquad.ops import native_library

_is_enabled = os.environ.get("SUBQUAD_NATIVE", "1") != "0"
_record: list[Choice] | None = None


@dataclass(frozen=True)
class Choice:
    """What computes one step of a call: the operators `subquad::OPERATOR_...` or, for the reasons given, PyTorch."""

    operator: str
    reasons: tuple[str, ...] = ()

    @property
    def is_native(self) -> bool:
        return not self.reasons


@contextmanager
def disabled() -> Iterator[None]:
    """Run on PyTorch only."""
    global _is_enabled
    before, _is_enabled = _is_enabled, False
    try:
        yield
    finally:
        _is_enabled = before


@contextmanager
def recorded() -> Iterator[list[Choice]]:
    """A list of the choices that are made inside, in their order."""
    global _record
    before, _record = _record, []
    try:
        yield _record
    finally:
        _record = before


def is_recording() -> bool:
    """Whether `recorded` lists the choices that are made."""
    return _record is not None


def has_kernels() -> bool:
    """Whether there are compiled kernels for this processor, and they are turned on."""
    return _is_enabled and not native_library.why_missing()


def choose(operator: str, tensors: tuple[Tensor | None, ...], *reasons: str) -> bool:
    """Whether to call the operators `subquad::OPERATOR_...` with these tensors. `reasons`: what the caller knows against it."""
    found = reasons or tuple(_reasons(tensors))
    if _record is not None and not torch.compiler.is_compiling():
        _record.append(Choice(operator, found))
    return not found


def _reasons(tensors: tuple[Tensor | None, ...]) -> Iterator[str]:
    if not _is_enabled:
        yield "compiled kernels are turned off, by SUBQUAD_NATIVE=0 or subquad.ops.disabled()"
    elif missing := native_library.why_missing():
        yield missing
    given = [x for x in tensors if x is not None]
    if device := next((x.device.type for x in given if x.device.type != "cpu"), None):
        yield f"the tensors are on {device!r}, and compiled kernels are for CPUs"
    if not torch.compiler.is_compiling():
        if any(_is_distributed(x) for x in given):
            yield "the tensors are distributed (DTensor)"
        if forward_ad._current_level >= 0:
            yield "compiled kernels have no forward-mode derivatives"


def _is_distributed(x: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def can_use_compiled(*tensors: Tensor | None) -> bool:
    """Whether a compiled kernel may read and write the memory of these tensors."""
    return _is_enabled and all(t is None or has_plain_memory(t) for t in tensors) and native_library.load() is not None


def has_plain_memory(x: Tensor) -> bool:
    """Whether `x` has CPU memory to read and write, and nothing traces or transforms what happens to it."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type == "cpu"
        and not torch._C._len_torch_dispatch_stack()  # fake tensors, export, operation counters
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )
