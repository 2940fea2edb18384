"""The operators `subquad::convolution_forward` and `subquad::convolution_backward`: a convolution along the sequence.

    out_i = base_i + sum_t kernel_t value_(i + t - taps // 2)

with zeros beyond both ends. Each head has its own kernel; taps is odd. The first operator takes base (B, H, N, Dv), value (B,
K, N, Dv) and kernel (H, taps), and returns out (B, H, N, Dv). The second returns the gradients of value, (B, K, N, Dv), and of
the kernel for each sequence of the batch, (B, H, taps). Both compute in float32 at least.

B batch, H query heads, K key-value heads, N tokens, Dv channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.errors import InputError
from subquad.ops import native_call
from subquad.ops.arguments import require_groups, require_heads, require_shape
from subquad.ops.double_backward import gradients_of_gradients
from subquad.ops.library import Differentiable, define, fold_vmap
from subquad.ops.precision import compute_dtype, upcast

_SIZES = ("batch", "heads", "kv_heads", "tokens", "channels", "taps")
_VIEWS = ("value", "base", "out", "grad", "d_value")
_Call = native_call.structure("ConvolutionCall", (*_SIZES, "threads"), (), _VIEWS, ("kernel", "d_kernel"))


def convolve(value: Tensor, kernel: Tensor) -> Tensor:
    """The values (B, K, N, Dv) of each head convolved with its row of kernel (H, taps) or (B, H, taps), in PyTorch."""
    padding, kv_heads = (kernel.shape[-1] // 2, 0), value.shape[1]
    if kernel.dim() == 2:
        return F.conv2d(value, kernel[:, None, :, None], padding=padding, groups=kv_heads)
    rows = kernel.flatten(0, 1)[:, None, :, None]  # (B H, 1, taps, 1)
    out = F.conv2d(value.flatten(0, 1)[None], rows, padding=padding, groups=len(kernel) * kv_heads)
    return out[0].unflatten(0, kernel.shape[:2])


def _check(like: Tensor, name: str, value: Tensor, kernel: Tensor) -> None:
    """`like` (B, H, N, Dv) is the base or a gradient."""
    require_heads(**{name: like, "value": value})
    if kernel.dim() != 2 or kernel.shape[1] % 2 == 0:
        raise InputError(f"kernel must have 2 dimensions, and the second one an odd size; got {tuple(kernel.shape)}.")
    (batch, kv_heads, tokens, channels), heads = value.shape, kernel.shape[0]
    require_groups(heads, kv_heads)
    require_shape(like, name, (batch, heads, tokens, channels))


def _native_forward(base: Tensor, value: Tensor, kernel: Tensor) -> Tensor:
    _check(base, "base", value, kernel)
    out = native_call.empty_rows(base, base.shape[3])
    views = {"value": native_call.as_rows(value), "base": native_call.as_rows(base), "out": out}
    _call("convolution_forward", views, {"kernel": _taps(kernel, out)})
    return out


def _pytorch_forward(base: Tensor, value: Tensor, kernel: Tensor) -> Tensor:
    _check(base, "base", value, kernel)
    out = native_call.empty_rows(base, base.shape[3]).copy_(base)
    return out.add_(convolve(upcast(value), kernel.to(out.dtype))) if out.numel() else out


def _fake_forward(base: Tensor, value: Tensor, kernel: Tensor) -> Tensor:
    return native_call.empty_rows(base, base.shape[3])


FORWARD = define(
    "convolution_forward(Tensor base, Tensor value, Tensor kernel) -> Tensor",
    fake=_fake_forward,
    pytorch=_pytorch_forward,
    native=_native_forward,
)


def _native_backward(grad: Tensor, value: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    _check(grad, "grad", value, kernel)
    d_value, d_kernel = _fake_backward(grad, value, kernel)
    views = {"value": native_call.as_rows(value), "grad": native_call.as_rows(grad), "d_value": d_value}
    _call("convolution_backward", views, {"kernel": _taps(kernel, d_value), "d_kernel": d_kernel})
    return d_value, d_kernel


def _pytorch_backward(grad: Tensor, value: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    _check(grad, "grad", value, kernel)
    found = d_value, d_kernel = _fake_backward(grad, value, kernel)
    if not value.numel():
        d_kernel.zero_()
        return found
    with torch.inference_mode(False), torch.enable_grad():
        tensors = [upcast(value).clone(), kernel.to(d_value.dtype).expand_as(d_kernel).clone()]
        out = convolve(*(x.requires_grad_() for x in tensors))
        grads = torch.autograd.grad(out, tensors, grad.to(out.dtype).clone())
    return d_value.copy_(grads[0]), d_kernel.copy_(grads[1])


def _fake_backward(grad: Tensor, value: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    d_value = native_call.empty_rows(value, value.shape[3])
    return d_value, d_value.new_empty(value.shape[0], *kernel.shape)


BACKWARD = define(
    "convolution_backward(Tensor grad, Tensor value, Tensor kernel) -> (Tensor, Tensor)",
    fake=_fake_backward,
    pytorch=_pytorch_backward,
    native=_native_backward,
)


def _taps(kernel: Tensor, like: Tensor) -> Tensor:
    return kernel.detach().to(like.dtype).contiguous().resolve_neg()


def _call(function: str, views: dict[str, Tensor], pointers: dict[str, Tensor]) -> None:
    (batch, kv_heads, tokens, channels), (heads, taps) = views["value"].shape, pointers["kernel"].shape
    numbers = dict(zip(_SIZES, (batch, heads, kv_heads, tokens, channels, taps), strict=True))
    native_call.call(function, _Call, numbers, views, pointers, batch * heads * taps * tokens * channels)


def _second_gradients(grads: tuple[Any, ...], saved: tuple[Any, ...], *_: Any) -> tuple[Any, ...]:
    grad, value, kernel = saved

    def run(value: Tensor, kernel: Tensor) -> Tensor:
        return convolve(upcast(value), kernel.to(compute_dtype(value)))

    with torch.enable_grad():
        kernels = kernel.expand(len(value), *kernel.shape)  # one for each sequence, as the results have them
    d_grad, d_value, d_kernels = gradients_of_gradients(run, grad, (value, kernels), grads)
    return d_grad, d_value, d_kernels.sum(0)


_BACKWARD = Differentiable(BACKWARD, 2, lambda inputs, _: (inputs, None), _second_gradients)


def _gradients(grads: tuple[Any, ...], saved: tuple[Any, ...], dtype: torch.dtype, _: Any) -> tuple[Any, ...]:
    value, kernel = saved
    d_value, d_kernel = _BACKWARD(grads[0], upcast(value), kernel)
    return grads[0].to(dtype), d_value.to(value.dtype), d_kernel.sum(0).to(kernel.dtype)


_FORWARD = Differentiable(FORWARD, 1, lambda inputs, _: (inputs[1:], inputs[0].dtype), _gradients)
fold_vmap(FORWARD, weights=(2,))
fold_vmap(BACKWARD, weights=(2,))


def add_convolved(base: Tensor, value: Tensor, kernel: Tensor) -> Tensor:
    """base (B, H, N, Dv) plus the values (B, K, N, Dv), convolved, in the precision that it was computed in."""
    out: Tensor = _FORWARD(base, value, kernel)
    return out
