"""How the compiled loops are called: tensors as addresses with strides."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.ops import native
from subquad.ops.hugepages import large_pages
from subquad.ops.precision import widen

_LITTLE = 2**19


class View(ctypes.Structure):
    """A tensor (batch, heads, tokens, channels), its channels side by side."""

    _fields_ = (("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("token", ctypes.c_int64))


def structure(name: str, whole: Sequence[str], real: Sequence[str], views: Sequence[str], pointers: Sequence[str]) -> Any:
    """A C structure of whole numbers, then real ones, views, and addresses."""
    fields = [
        *((field, ctypes.c_int64) for field in whole),
        *((field, ctypes.c_double) for field in real),
        *((field, View) for field in views),
        *((field, ctypes.c_void_p) for field in pointers),
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def run(
    function: str,
    call: Any,
    numbers: Mapping[str, float],
    views: Mapping[str, Tensor],
    pointers: Mapping[str, Tensor | None],
    work: int,
) -> None:
    """Call `subquad_FUNCTION_DTYPE` with a structure of class `call`, which has `threads` among its whole numbers.

    `work` is about how many products of numbers it is: few are done before a second thread has woken up.
    """
    given = call(**numbers, threads=torch.get_num_threads() if work > _LITTLE else 1)
    for name, x in views.items():
        setattr(given, name, View(x.data_ptr(), *x.stride()[:3]))
    for name, t in pointers.items():
        setattr(given, name, None if t is None else t.data_ptr())
    library = native.library()
    assert library is not None
    dtype = str(next(t for t in (*views.values(), *pointers.values()) if t is not None).dtype).removeprefix("torch.")
    getattr(library, f"subquad_{function}_{dtype}")(ctypes.byref(given))


def rows(x: Tensor) -> Tensor:
    """`x` in the precision to compute in, channels side by side."""
    x = widen(x.detach())
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def room(like: Tensor, width: int) -> Tensor:
    """(B, H, N, width), heads before tokens or tokens before heads as `like` has them."""
    batch, heads, tokens, _ = like.shape
    if like.stride(1) < like.stride(2):
        return large_pages(like.new_empty(batch, tokens, heads, width).transpose(1, 2))
    return large_pages(like.new_empty(batch, heads, tokens, width))
