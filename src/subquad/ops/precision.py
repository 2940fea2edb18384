"""What every engine asks of its tensors: in which precision to compute, whether a result is NaN, who needs gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

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


def largest_magnitude(x: Tensor) -> float:
    """The largest |x|; 0 where that is unknown."""
    return _look(lambda: max(x.detach().amax().item(), -x.detach().amin().item()), x) or 0.0 if x.numel() else 0.0


def _total(x: Tensor) -> float | None:
    return _look(lambda: x.detach().sum().item(), x)


def _look(value: Callable[[], float], x: Tensor) -> float | None:
    """What `value` reads of `x`; None where it cannot, or not without waiting: traced calls, fake tensors, vmap, a GPU."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return None
    try:
        return value()
    except RuntimeError:
        return None


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on any of these tensors, and so may keep them in memory."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
