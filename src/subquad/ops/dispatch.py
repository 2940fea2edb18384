"""Chooses between compiled kernels and plain PyTorch, and records why.

Every operator `subquad::...` has two bodies, `IMPLEMENTATIONS`, in the order in which they are tried: the first one without a
reason against it runs. An engine asks `choose` whether to call its operators at all, with the tensors that it has; an operator
looks only for what it cannot run without. `disabled`, or the environment variable SUBQUAD_NATIVE=0, turns the kernels off.
`recorded` lists which body each operator ran, or would have run on fake tensors, and why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from subquad.ops import native_library

Body = Literal["native", "pytorch"]
_is_enabled = os.environ.get("SUBQUAD_NATIVE", "1") != "0"
_record: list[Choice] | None = None
_records_fakes = False


@dataclass(frozen=True)
class Choice:
    """What computes one step of a call.

    Args:
        operator: such as "subquad::kernelized_forward"; only "subquad::kernelized" where an engine does not call its operators.
        reasons: why it is not the compiled kernel; empty if it is.
    """

    operator: str
    reasons: tuple[str, ...] = ()

    @property
    def is_native(self) -> bool:
        return not self.reasons

    @property
    def body(self) -> Body:
        return "native" if self.is_native else "pytorch"

    def __str__(self) -> str:
        return f"{self.operator}: {self.body}" + (f" ({'; '.join(self.reasons)})" if self.reasons else "")


class Implementation(NamedTuple):
    """A body of all operators, and what speaks against it, given the arguments of a call."""

    body: Body
    reasons: Callable[[Sequence[Any]], Iterator[str]]


def _against_native(tensors: Sequence[Any]) -> Iterator[str]:
    if not _is_enabled:
        yield "compiled kernels are turned off, by SUBQUAD_NATIVE=0 or subquad.ops.disabled()"
    elif missing := native_library.why_missing():
        yield missing
    unusual = [x for x in tensors if not (type(x) is Tensor and x.is_cpu) and isinstance(x, Tensor)]
    if device := next((x.device.type for x in unusual if x.device.type != "cpu"), None):
        yield f"the tensors are on {device!r}, and compiled kernels are for CPUs"
    if not torch.compiler.is_compiling():
        if any(_is_distributed(x) for x in unusual):
            yield "the tensors are distributed (DTensor)"
        if forward_ad._current_level >= 0:
            yield "compiled kernels have no forward-mode derivatives"


def _against_pytorch(_: Sequence[Any]) -> Iterator[str]:
    return iter(())


IMPLEMENTATIONS = (Implementation("native", _against_native), Implementation("pytorch", _against_pytorch))


def _is_distributed(x: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


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
def recorded(*, on_fake_tensors: bool = False) -> Iterator[list[Choice]]:
    """A list of the choices that are made inside, in their order; of operators on fake tensors only if asked for."""
    global _record, _records_fakes
    before = _record, _records_fakes
    _record, _records_fakes = [], on_fake_tensors
    try:
        yield _record
    finally:
        _record, _records_fakes = before


def is_recording() -> bool:
    """Whether `recorded` lists the choices that are made."""
    return _record is not None


def has_kernels() -> bool:
    """Whether there are compiled kernels for this processor, and they are turned on."""
    return _is_enabled and not native_library.why_missing()


def choose(operator: str, tensors: Sequence[Tensor | None], *reasons: str) -> bool:
    """Whether to call the operators `subquad::OPERATOR_...` with these tensors. `reasons`: what the caller knows against it."""
    body, against = select(tensors, reasons)
    if _record is not None and not torch.compiler.is_compiling():
        note(operator, against)
    return body == "native"


def select(tensors: Sequence[Any], known: Sequence[str] = ()) -> tuple[Body, tuple[str, ...]]:
    """The first implementation that nothing speaks against, and the reasons against those before it.

    `tensors` may contain what is no tensor. `known`: what the caller knows against the native one; then nothing else is asked.
    """
    against: tuple[str, ...] = ()
    for implementation in IMPLEMENTATIONS:
        reasons = tuple(known) if known and implementation.body == "native" else tuple(implementation.reasons(tensors))
        if not reasons:
            return implementation.body, against
        against += reasons
    raise AssertionError(against)


def note(operator: str, reasons: Sequence[str] = (), *, given: Sequence[Any] = (), is_fake: bool = False) -> None:
    """Record which body of `subquad::OPERATOR` runs: the native one, unless there are reasons against it, here or in `given`.

    For code that calls a native body directly, too. What an engine chose stands until the first of its operators is recorded.
    """
    if _record is None or (is_fake and not _records_fakes):
        return
    choice = Choice(f"subquad::{operator}", select(given, reasons)[1] if given else tuple(reasons))
    if _record and choice.operator.startswith(f"{_record[-1].operator}_"):
        _record.pop()
    _record.append(choice)


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
