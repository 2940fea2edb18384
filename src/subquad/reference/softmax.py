"""o_i = sum_j softmax_j(s q_i . k_j + mask_ij) v_j."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from subquad.reference.weighted import average


def attention(
    mechanism: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    allowed: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    **_: Any,
) -> Tensor:
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)  # (B, H, N, M)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = allowed & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    scores = scores.masked_fill(~allowed, -math.inf)
    if scores.shape[-1] == 0:
        return average(scores, value)
    largest = scores.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0)
    return average((scores - largest).exp(), value)
