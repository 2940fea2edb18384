"""w_ij = e^(s q_i . k_j) within the window and g phi(q_i) . phi(k_j) beyond it, all divided by their sum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.reference.feature_maps import phi
from subquad.reference.weighted import average


def attention(
    mechanism: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    allowed: Tensor,
    real: Tensor,
    weights: Mapping[str, Tensor],
    scale: float | None,
    **_: Any,
) -> Tensor:
    if not query.shape[2]:
        return query @ key.mT @ value
    position = real.cumsum(1)  # among the real tokens
    allowed = allowed & real[:, None, :, None]
    near = (position[:, None, :, None] - position[:, None, None, :]).abs() <= mechanism.window
    fq, fk = (phi(mechanism.map, x, weights, side, scale) for x, side in ((query, "query"), (key, "key")))
    log_mix = weights["log_mix"].to(query.dtype)[:, None, None]
    far = fq @ fk.mT * (allowed & ~near)
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~(allowed & near), -math.inf)
    # Relative to the largest of a row, which cancels.
    total = far.sum(-1, keepdim=True)
    top = torch.maximum(scores.amax(-1, keepdim=True), total.log() + log_mix).detach()
    top = torch.where(top == -math.inf, 0, top)
    return average((scores - top).exp() + far * torch.where(total > 0, log_mix - top, -math.inf).exp(), value)
