"""o_i = sum_j (1 + cos(q_i, k_j)) v_j / sum_j (1 + cos(q_i, k_j)); the cosine with a zero vector is 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.reference.weighted import average


def attention(mechanism: Any, query: Tensor, key: Tensor, value: Tensor, *, allowed: Tensor, **_: Any) -> Tensor:
    return average((1 + unit(query) @ unit(key).mT) * allowed, value)


def unit(x: Tensor) -> Tensor:
    """x / |x|; zero, with zero gradient, for zero. The squares of very small or large entries would be out of range."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    x = x / torch.where(largest == 0, 1, largest)
    squares = x.square().sum(-1, keepdim=True)
    return torch.where(largest == 0, 0, x / torch.where(largest == 0, 1, squares).sqrt())
