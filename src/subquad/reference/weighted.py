"""Sums over keys with a weight for every pair."""

from __future__ import annotations

import torch
from torch import Tensor


def average(weights: Tensor, value: Tensor) -> Tensor:
    """sum_j w_ij v_j / sum_j w_ij, and 0 where all weights are 0. weights (B, H, N, M), value (B, H, M, Dv)."""
    total = weights.sum(-1, keepdim=True)
    return (weights @ value) / torch.where(total == 0, 1, total)
