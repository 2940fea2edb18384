"""What every engine asks of its tensors: in which precision to compute, and whether autograd needs gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The precision to compute in: float32, or that of `x` if higher."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x: Tensor) -> Tensor:
    """`x` in the precision to compute in."""
    return x.to(compute_dtype(x))


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on any of these tensors, and so may keep them in memory."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
