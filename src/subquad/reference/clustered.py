"""Head by head and cluster by cluster: the weights of the mean query; each query computes the k largest of them itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
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
    batch, heads, queries, dim = query.shape
    out = query.new_zeros(batch, heads, queries, value.shape[-1])
    if queries == 0:
        return out
    key = key * (dim**-0.5 if scale is None else scale)
    w = weights["projection"].to(query.dtype)
    for b in range(batch):
        keys = allowed[b, 0, 0]  # (M,): which are real
        shaping = keys if len(keys) == queries else torch.ones_like(query[b, 0, :, 0], dtype=torch.bool)
        for h in range(heads):
            out[b, h] = one_head(mechanism, query[b, h], key[b, h, keys], value[b, h, keys], shaping, w)
    return out


def one_head(mechanism: Any, query: Tensor, key: Tensor, value: Tensor, shaping: Tensor, w: Tensor) -> Tensor:
    """Queries (N, D), of which `shaping` (N,) form the clusters, over the real keys, scaled, (M, D) and values (M, Dv)."""
    out = query.new_zeros(query.shape[0], value.shape[-1])
    if key.shape[0] == 0:
        return out
    assignment = k_means(sign(query @ w.mT), shaping, mechanism.clusters, mechanism.iterations)
    for c in assignment.unique():
        members = assignment == c
        mean = query[members & shaping].sum(0) / (members & shaping).sum().clamp(min=1)
        scores = key @ mean  # (M,)
        top = scores.sort(descending=True, stable=True).indices[: mechanism.topk]
        shared = scores.softmax(0)
        rows = shared.repeat(int(members.sum()), 1)  # (members, M)
        rows[:, top] = shared[top].sum() * (query[members] @ key[top].mT).softmax(-1)
        out[members] = rows @ value
    return out


def k_means(codes: Tensor, shaping: Tensor, clusters: int, iterations: int) -> Tensor:
    """The cluster of each code (N, bits), formed by those in `shaping`: (N,)."""
    real = codes[shaping]
    count = min(clusters, len(real))
    if count == 0:
        return codes.new_zeros(len(codes))
    centroids = torch.stack([real[c * len(real) // count] for c in range(count)])  # (C, bits)
    for _ in range(iterations):
        nearest = (real @ centroids.mT).argmax(-1)  # of equal ones the first
        for c in nearest.unique():
            centroids[c] = sign(real[nearest == c].sum(0))
    return (codes @ centroids.mT).argmax(-1)


def sign(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1, -1)
