"""One token per sequence that continues a state: the compiled kernel, prepared once, and an operator that changes the sums.

`Step` is what eager calls use: sizes, strides and weights are passed to the kernel once, and each token only passes addresses.
`subquad::kernelized_step` is what traced calls use for a donated state; its schema says that it overwrites the sums.

B batch, H query heads, K key-value heads, D channels, Dv value channels, m features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.errors import OutOfMemoryError, StateError
from subquad.ops import native_call, native_library
from subquad.ops.kernelized import native, operator, pytorch
from subquad.ops.kernelized.rule import Inputs, KernelizedRule, Sums
from subquad.ops.library import define

_NAMES = ("S", "level", "count")
_TOKEN = (ctypes.c_void_p,) * 11  # the prepared step; query, key, value, out; the sums in, and out


class Step:
    """The kernel of csrc/kernelized/step.cpp for tensors of one shape, and the same strides."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, rule: KernelizedRule) -> None:
        """From tensors (B, H or K, 1, ...) like those of every step, in the precision to compute in, with adjacent channels."""
        library = native_library.load()
        assert library is not None
        self._weights, self._call = native.step_call(query, key, value, rule)
        dtype = native_call.dtype_name(query)
        prepare = getattr(library, f"subquad_prepare_step_{dtype}")
        prepare.restype = ctypes.c_void_p
        self._run: Any = getattr(library, f"subquad_step_{dtype}")
        self._run.argtypes = _TOKEN
        self._release = getattr(library, f"subquad_release_step_{dtype}")
        self._release.argtypes = (ctypes.c_void_p,)
        self._handle = prepare(ctypes.byref(self._call))
        if not self._handle:
            raise OutOfMemoryError("the compiled kernel needs memory for the weights of a feature map; there is not enough.")
        self._shape = (*query.shape[:3], value.shape[3])
        self._shapes = native.sum_shapes(key, value, rule)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._release(self._handle)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, past: Mapping[str, Any], *, in_place: bool
    ) -> tuple[Tensor, Any]:
        """The output (B, H, 1, Dv) and the sums with this token: those of `past`, changed, if `in_place`."""
        out = query.new_empty(self._shape)
        sums = past if in_place else {name: out.new_empty(shape) for name, shape in self._shapes.items()}
        before = [past[name].data_ptr() if name in past else None for name in _NAMES]
        after = before if in_place else [sums[name].data_ptr() if name in sums else None for name in _NAMES]
        result = self._run(self._handle, query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), *before, *after)
        if result:
            raise native_call.error(result, "step", {"query": query, "key": key, "value": value})
        return out, sums


def _step(body: Any, query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Tensor:
    inputs, numbers = operator.checked(query, key, value, None, given[3:])
    rule = numbers.rule(key.shape[3])
    shapes = native.sum_shapes(key, value, rule)
    past = {name: t for name, t in zip(_NAMES, given[:3], strict=True) if t is not None}
    if {name: tuple(t.shape) for name, t in past.items()} != shapes:
        found = {name: tuple(t.shape) for name, t in past.items()}
        raise StateError(f"the sums of a state must have the shapes {shapes}; got {found}.")
    out: Tensor = body(inputs, rule, past)
    return out


def _native_step(inputs: Inputs, rule: KernelizedRule, past: Sums) -> Tensor:
    query, key, value = (native_call.as_rows(x) for x in inputs[:3])
    held = {name: t.to(query.dtype).contiguous() for name, t in past.items()}
    out, _ = Step(query, key, value, rule)(query, key, value, held, in_place=True)
    for name, t in past.items():
        if held[name] is not t:
            t.copy_(held[name])
    return out


def _pytorch_step(inputs: Inputs, rule: KernelizedRule, past: Sums) -> Tensor:
    sums = dict(past)
    found, _ = pytorch.attend(inputs, rule, sums)
    for name, t in past.items():
        t.copy_(sums[name])
    return inputs.query.new_empty(*inputs.query.shape[:3], inputs.value.shape[3], dtype=found.dtype).copy_(found)


def _fake_step(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:3], value.shape[3], dtype=dtype)


STEP = define(
    "kernelized_step(Tensor query, Tensor key, Tensor value, Tensor(a!) sums, Tensor(b!)? level, Tensor(c!)? count, "
    f"{operator.RULE}) -> Tensor",
    fake=_fake_step,
    pytorch=partial(_step, _pytorch_step),
    native=partial(_step, _native_step),
)


def update(inputs: Inputs, rule: KernelizedRule, past: Sums) -> Tensor:
    """The output (B, H, 1, Dv) of one causal token per sequence; `past` is overwritten with the sums after it."""
    out: Tensor = STEP(*inputs[:3], *(past.get(name) for name in _NAMES), *operator.rule_arguments(rule, is_causal=True))
    return out
