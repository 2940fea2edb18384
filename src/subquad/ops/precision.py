"""What every engine asks of its tensors: the precision to compute in, and whether a graph is recorded."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> torch.dtype:
    """The precision to compute in: sums are kept in float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def widen(x: Tensor) -> Tensor:
    """`x` in the precision to compute in."""
    return x.to(wide(x))


def is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is done with any of them, and so may keep them as they are."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
