"""Calls into the library of compiled kernels: tensors as addresses with strides, everything in one C structure."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.errors import OutOfMemoryError
from subquad.ops import native_library
from subquad.ops.hugepages import advise_huge_pages
from subquad.ops.precision import compute_dtype, upcast

_DONE, _OUT_OF_MEMORY = 0, 1  # enum Result of csrc/common/errors.h
_ONE_THREAD_WORK = 2**19  # multiplications that one thread finishes before a second one has woken up


@native_library.mirrored
class View(ctypes.Structure):
    """A tensor (batch, heads, tokens, channels) whose channels are adjacent in memory; struct View of csrc/common/view.h."""

    _fields_ = (("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("token", ctypes.c_int64))


def structure(name: str, integers: Sequence[str], reals: Sequence[str], views: Sequence[str], pointers: Sequence[str]) -> Any:
    """A class for the C structure of this name, with these fields in this order; `native_library.load` compares the two."""
    fields = [
        *((field, ctypes.c_int64) for field in integers),
        *((field, ctypes.c_double) for field in reals),
        *((field, View) for field in views),
        *((field, ctypes.c_void_p) for field in pointers),
    ]
    return native_library.mirrored(type(name, (ctypes.Structure,), {"_fields_": fields}))


def call(
    function: str,
    structure: Any,
    numbers: Mapping[str, float],
    views: Mapping[str, Tensor],
    pointers: Mapping[str, Tensor | None],
    work: int,
) -> None:
    """Call `subquad_FUNCTION_DTYPE` with a `structure` that has `threads` among its integers.

    `work` is roughly the number of multiplications; for little work one thread is faster than several.
    """
    given = arguments(structure, numbers, views, pointers, work)
    library = native_library.load()
    assert library is not None
    dtype = dtype_name(next(t for t in (*views.values(), *pointers.values()) if t is not None))
    result = getattr(library, f"subquad_{function}_{dtype}")(ctypes.byref(given))
    if result != _DONE:
        raise error(result, function, {**views, **pointers})


def arguments(
    structure: Any, numbers: Mapping[str, float], views: Mapping[str, Tensor], pointers: Mapping[str, Tensor | None], work: int
) -> Any:
    """A `structure` with these fields; see `call`."""
    given = structure(**numbers, threads=torch.get_num_threads() if work > _ONE_THREAD_WORK else 1)
    for name, x in views.items():
        setattr(given, name, View(x.data_ptr(), *x.stride()[:3]))
    for name, t in pointers.items():
        setattr(given, name, None if t is None else t.data_ptr())
    return given


def dtype_name(x: Tensor) -> str:
    """How the functions of the library name the precision of `x`."""
    return str(x.dtype).removeprefix("torch.")


def error(result: int, function: str, tensors: Mapping[str, Tensor | None]) -> Exception:
    """What to raise when a kernel has not returned `_DONE`."""
    if result != _OUT_OF_MEMORY:
        return RuntimeError(f"the compiled kernel {function} failed with code {result}.")
    given = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items() if t is not None)
    return OutOfMemoryError(
        f"the compiled kernel {function} needs memory to work in, and there is not enough; got {given}. Pass a smaller batch "
        "or a shorter sequence."
    )


def as_rows(x: Tensor) -> Tensor:
    """`x`, detached, in the precision to compute in, with adjacent channels; a copy only if that takes one.

    Gradients may be lazy views, whose memory has the opposite signs.
    """
    x = upcast(x.detach())
    if x.is_neg():
        x = x.resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def empty_rows(like: Tensor, width: int) -> Tensor:
    """An uninitialised (B, H, N, width) tensor in the precision to compute in, with heads and tokens in the order of `like`."""
    (batch, heads, tokens, _), dtype = like.shape, compute_dtype(like)
    if like.stride(1) < like.stride(2):
        return advise_huge_pages(like.new_empty(batch, tokens, heads, width, dtype=dtype).transpose(1, 2))
    return advise_huge_pages(like.new_empty(batch, heads, tokens, width, dtype=dtype))
