"""o_i = sum_r softmax_r(s q_i . (E k)_r) (F v)_r, for each sequence of the batch, over its real tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


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
    heads, scale = query.shape[1], query.shape[-1] ** -0.5 if scale is None else scale
    E, F = (_matrix(weights, name, heads).to(query.dtype) for name in ("key_projection", "value_projection"))
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for b, real in enumerate(allowed[:, 0].any(1)):  # (M,)
        k, v = key[b, :, real], value[b, :, real]  # (H, n, D), (H, n, Dv)
        n = k.shape[1]
        weight = (query[b] @ (E[..., :n] @ k).mT * scale).softmax(-1)  # (H, N, rank)
        out[b] = weight @ (F[..., :n] @ v)
    return out


def _matrix(weights: Mapping[str, Tensor], name: str, heads: int) -> Tensor:
    """(rank, max_length), or (H, rank, max_length) where each head has its own."""
    matrix = weights.get(name, weights.get("projection"))
    assert matrix is not None
    return matrix if matrix.dim() == 2 else matrix.repeat_interleave(heads // matrix.shape[0], dim=0)
