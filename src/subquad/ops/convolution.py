"""Convolution along the sequence, in compiled code (csrc/convolution/convolution.cpp)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.ops import native_call
from subquad.ops.double_backward import forbid_double_backward
from subquad.ops.precision import needs_gradient

_SIZES = ("batch", "heads", "kv_heads", "tokens", "channels", "taps")
_Call = native_call.structure("Call", (*_SIZES, "threads"), (), ("value", "out", "grad", "d_value"), ("kernel", "d_kernel"))


def add_convolved(out: Tensor, value: Tensor, kernel: Tensor) -> Tensor:
    """As `subquad.engines.convolution.add_convolved`."""
    if needs_gradient(out, value, kernel):
        return _Convolution.apply(out, value, kernel)  # type: ignore[no-untyped-call]
    out = native_call.as_rows(out)
    _call("convolution_forward", {"value": native_call.as_rows(value), "out": out}, {"kernel": kernel.contiguous()})
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(out: Tensor, value: Tensor, kernel: Tensor) -> Tensor:
        return add_convolved(native_call.empty_rows(out, out.shape[3]).copy_(out), value, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        value, kernel = ctx.saved_tensors
        value_rows, grad_rows = native_call.as_rows(value), native_call.as_rows(grad)
        d_value = native_call.empty_rows(value_rows, value_rows.shape[3])
        d_kernel = value_rows.new_empty(len(value_rows), *kernel.shape)
        views = {"value": value_rows, "grad": grad_rows, "d_value": d_value}
        _call("convolution_backward", views, {"kernel": kernel.detach().contiguous(), "d_kernel": d_kernel})
        return grad, *forbid_double_backward([d_value, d_kernel.sum(0)], [grad, value, kernel])


def _call(function: str, views: dict[str, Tensor], pointers: dict[str, Tensor]) -> None:
    (batch, kv_heads, tokens, channels), (heads, taps) = views["value"].shape, pointers["kernel"].shape
    numbers = dict(zip(_SIZES, (batch, heads, kv_heads, tokens, channels, taps), strict=True))
    native_call.call(function, _Call, numbers, views, pointers, batch * heads * taps * tokens * channels)
