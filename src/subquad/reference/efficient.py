"""o_i = sum_c softmax_c(q_i)_c sum_j softmax_j(k_jc) v_j, the softmax over positions running over the allowed j."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attention(mechanism: Any, query: Tensor, key: Tensor, value: Tensor, *, allowed: Tensor, **_: Any) -> Tensor:
    if key.shape[2] == 0:
        return (query @ key.mT) @ value
    channels = query.softmax(-1)  # (B, H, N, D)
    logits = key.unsqueeze(2).masked_fill(~allowed.unsqueeze(-1), -math.inf)  # (B, H, N, M, D)
    largest = logits.detach().amax(3, keepdim=True)
    weights = (logits - largest.masked_fill(largest == -math.inf, 0)).exp()
    total = weights.sum(3, keepdim=True)
    positions = weights / torch.where(total == 0, 1, total)
    return torch.einsum("bhnc,bhnmc,bhmv->bhnv", channels, positions, value)
