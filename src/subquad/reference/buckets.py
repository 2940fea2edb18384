"""Softmax over the union, over all rounds, of the keys that stand near a query when sorted by (bucket, position)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.reference import softmax
from subquad.reference.taylor import unit


def reformer(
    mechanism: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    weights: Mapping[str, Tensor],
    scale: float | None,
    **call: Any,
) -> Tensor:
    rotations = weights["rotations"].to(query.dtype)
    rotations = rotations.repeat_interleave(query.shape[1] // rotations.shape[0], dim=0)  # (H, R, b/2, D)

    def hashes(x: Tensor) -> Tensor:
        u = torch.einsum("bhnd,hrcd->bhrnc", x, rotations)
        return torch.cat([u, -u], dim=-1).argmax(-1)  # (B, H, R, N)

    visible = _visible(hashes(query), hashes(key), mechanism.chunk, **call)
    if not mechanism.shared_qk:
        return _over(visible | _own(query), query, key, value, scale=scale, **call)
    visible = visible | (_own(query) & ~(visible & call["allowed"]).any(-1, keepdim=True))
    return _over(visible, query, unit(key), value, scale=1.0 if scale is None else scale, **call)


def routing(mechanism: Any, query: Tensor, key: Tensor, value: Tensor, *, weights: Mapping[str, Tensor], **call: Any) -> Tensor:
    centroids = weights["centroids"].to(query.dtype)
    centroids = centroids.repeat_interleave(query.shape[1] // centroids.shape[0], dim=0)  # (H, b, D)
    nearest = [(unit(x) @ centroids.mT).argmax(-1).unsqueeze(2) for x in (query, key)]
    visible = _visible(nearest[0], nearest[1], mechanism.chunk, **call)
    return _over(visible | _own(query), query, key, value, **call)


def _visible(query_bucket: Tensor, key_bucket: Tensor, chunk: int, *, is_causal: bool, real: Tensor, **_: Any) -> Tensor:
    """Who sees whom, except a token itself, from buckets (B, H, R, N): (B, H, N, N)."""
    batch, heads, rounds, length = query_bucket.shape
    pairs: set[tuple[int, int, int, int]] = set()
    for b in range(batch):
        tokens = real[b].nonzero().squeeze(1).tolist()
        for h in range(heads):
            for r in range(rounds):
                qs, ks = query_bucket[b, h, r].tolist(), key_bucket[b, h, r].tolist()
                ordered = sorted((ks[t], t) for t in tokens)
                for i in tokens:
                    place = bisect_left(ordered, (qs[i], i))  # how many stand before it
                    if is_causal:
                        near = range(max(place - chunk, 0), place)
                    else:
                        near = range(max(place // chunk - 1, 0) * chunk, min((place // chunk + 1) * chunk, len(ordered)))
                    pairs.update((b, h, i, j) for bucket, j in (ordered[slot] for slot in near) if bucket == qs[i] and i != j)
    seen = torch.zeros(batch, heads, length, length, dtype=torch.bool, device=real.device)
    if pairs:
        seen[tuple(torch.tensor(sorted(pairs), device=real.device).T)] = True
    return seen


def _own(query: Tensor) -> Tensor:
    return torch.eye(query.shape[2], dtype=torch.bool, device=query.device)


def _over(
    visible: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    allowed: Tensor,
    real: Tensor,
    scale: float | None,
    **_: Any,
) -> Tensor:
    """The rows of pads see nothing."""
    allowed = allowed & visible & real[:, None, :, None]
    return softmax.attention(None, query, key, value, allowed=allowed, attn_mask=None, scale=scale)
