"""What every engine asks of its tensors: in which precision to compute, whether a result is NaN, who needs gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The precision to compute in: float32, or that of `x` if higher."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x: Tensor) -> Tensor:
    """`x` in the precision to compute in."""
    return x.to(compute_dtype(x))


def has_nan(x: Tensor) -> bool:
    """Whether a NaN is in `x`; False where that is unknown."""
    total = _total(x)
    return total is not None and math.isnan(total)


def all_finite(x: Tensor) -> bool:
    """Whether all of `x` is finite; False where that is unknown, or where the sum overflows."""
    total = _total(x)
    return total is not None and math.isfinite(total)


def _total(x: Tensor) -> float | None:
    """The sum; None where values cannot be looked at, or not without waiting: traced calls, fake tensors, vmap, a GPU."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return None
    try:
        return x.detach().sum().item()
    except RuntimeError:
        return None


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on any of these tensors, and so may keep them in memory."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
