"""o_i = sum_p softmax_p(s q_i . (h k)_p) (h v)_p, h_p = softmax_j(s I_p . k_j): softmax attention twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from subquad.reference import softmax


def attention(
    mechanism: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    allowed: Tensor,
    scale: float | None,
    weights: Mapping[str, Tensor],
    **_: Any,
) -> Tensor:
    points = weights["points"].to(query.dtype)
    points = points.repeat_interleave(query.shape[1] // points.shape[0], dim=0)  # (H, m, D)
    points = points.expand(query.shape[0], *points.shape)
    real = allowed.any(2, keepdim=True)  # (B, 1, 1, M)
    options: dict[str, Any] = {"attn_mask": None, "scale": scale}
    hk, hv = (softmax.attention(mechanism, points, key, x, allowed=real, **options) for x in (key, value))
    everywhere = real.new_ones(1, 1, 1, points.shape[2])
    return softmax.attention(mechanism, query, hk, hv, allowed=everywhere, **options)
