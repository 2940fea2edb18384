"""The convolution's compiled loops, called from PyTorch: convolution.cpp has what they do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.ops import calls
from subquad.ops.once import once
from subquad.ops.precision import is_recorded

_NUMBERS = ("batch", "heads", "kv_heads", "tokens", "channels", "taps")
_Call = calls.structure("Call", (*_NUMBERS, "threads"), (), ("value", "out", "grad", "d_value"), ("kernel", "d_kernel"))


def add_convolved(out: Tensor, value: Tensor, kernel: Tensor) -> Tensor:
    """As the engine's own `add_convolved`."""
    if is_recorded(out, value, kernel):
        return _Convolution.apply(out, value, kernel)  # type: ignore[no-untyped-call]
    out = calls.rows(out)
    _run("convolution_forward", {"value": calls.rows(value), "out": out}, {"kernel": kernel.contiguous()})
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(out: Tensor, value: Tensor, kernel: Tensor) -> Tensor:
        return add_convolved(calls.room(out, out.shape[3]).copy_(out), value, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        value, kernel = ctx.saved_tensors
        rows, wide = calls.rows(value), calls.rows(grad)
        d_value = calls.room(rows, rows.shape[3])
        d_kernel = rows.new_empty(len(rows), *kernel.shape)
        views = {"value": rows, "grad": wide, "d_value": d_value}
        _run("convolution_backward", views, {"kernel": kernel.detach().contiguous(), "d_kernel": d_kernel})
        return grad, *once([d_value, d_kernel.sum(0)], [grad, value, kernel])


def _run(function: str, views: dict[str, Tensor], given: dict[str, Tensor | None]) -> None:
    value, kernel = views["value"], given["kernel"]
    assert kernel is not None
    batch, kv_heads, tokens, channels = value.shape
    numbers = dict(zip(_NUMBERS, (batch, len(kernel), kv_heads, tokens, channels, kernel.shape[1]), strict=True))
    calls.run(function, _Call, numbers, views, given, batch * kernel.numel() * tokens * channels)
