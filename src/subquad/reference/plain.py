"""o_i = scale_i sum_j (q_i . k_j) v_j, scale_i = 1 / (D n_i), or 1 / D, or the given scale; n_i counts the allowed keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def attention(
    mechanism: Any, query: Tensor, key: Tensor, value: Tensor, *, allowed: Tensor, scale: float | None, **_: Any
) -> Tensor:
    out = (query @ key.mT * allowed) @ value
    if scale is not None:
        return out * scale
    if mechanism.normalize == "count":
        out = out / allowed.sum(-1, keepdim=True).clamp(min=1)
    return out / query.shape[-1]
