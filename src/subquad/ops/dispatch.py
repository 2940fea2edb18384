"""The choice between a compiled kernel and its PyTorch fallback.

Every engine has both. The fallback runs wherever the compiled kernels cannot, and the tests compare the two. `disabled`, or the
environment variable SUBQUAD_NATIVE=0, turns the compiled kernels off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

from subquad.ops import native_library

_is_enabled = os.environ.get("SUBQUAD_NATIVE", "1") != "0"


@contextmanager
def disabled() -> Iterator[None]:
    """Run the PyTorch fallbacks only."""
    global _is_enabled
    before, _is_enabled = _is_enabled, False
    try:
        yield
    finally:
        _is_enabled = before


def can_use_compiled(*tensors: Tensor | None) -> bool:
    """Whether a compiled kernel may read and write these tensors."""
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
