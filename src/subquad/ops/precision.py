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
    """Whether a NaN is in `x`, which is in CPU memory. False where that is unknown: traced calls, fake tensors, vmap, a GPU."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    try:
        return math.isnan(x.detach().sum().item())
    except RuntimeError:  # there are no values to look at
        return False


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on any of these tensors, and so may keep them in memory."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
