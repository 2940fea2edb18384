"""Attention of clustered queries, in PyTorch.

Queries are arranged in blocks of one cluster each, so that a block attends to the top keys of its cluster in one small product.
The weights (C, M) are formed a piece at a time, unless gradients are recorded.

B batch, H query heads, K key-value heads, G = H / K query heads per key-value head, N queries, M keys, D channels, Dv value
channels, C clusters, g blocks of b queries, k top keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.masks import zero_pads
from subquad.ops.clustered.inputs import ClusterAttention, ClusteredInputs
from subquad.ops.clustered.rows import gather_rows, piece_lengths, sum_rows
from subquad.ops.precision import needs_gradient


def attend(inputs: ClusteredInputs, clusters: int, topk: int, scale: float) -> tuple[Tensor, ClusterAttention]:
    """The output (B, H, N, Dv), and what the queries of each cluster share."""
    query, key, value, assignment, mask, real = inputs
    at_once = needs_gradient(query, key, value)
    count = sum_rows(zero_pads(torch.ones_like(query[..., :1]), real), assignment, clusters)
    centroid = sum_rows(zero_pads(query, real), assignment, clusters) / count.clamp(min=1)  # (B, H, C, D)
    keys = _Keys(key, value, mask, scale)
    shared = _attend_centroids(centroid, keys, topk, at_once)
    if not topk:
        return gather_rows(shared.rest, assignment), shared
    return _attend_top_keys(query, keys, shared, _blocks(assignment, clusters), at_once), shared


@dataclass(frozen=True)
class _Keys:
    """Keys and values, 0 in pads, and the factor on q . k."""

    key: Tensor
    value: Tensor
    mask: Tensor | None  # (B, M)
    scale: float


def _attend_centroids(centroid: Tensor, keys: _Keys, topk: int, at_once: bool) -> ClusterAttention:
    """Attention of the centroids (B, H, C, D)."""
    row = centroid.shape[0] * centroid.shape[1] * keys.key.shape[2]
    pieces = centroid.split(piece_lengths(centroid.shape[2], row, at_once), dim=2)
    found = zip(*(_attend_centroid_piece(piece, keys, topk) for piece in pieces), strict=True)
    return ClusterAttention(*(torch.cat(tensors, dim=2) for tensors in found))


def _attend_centroid_piece(centroid: Tensor, keys: _Keys, topk: int) -> tuple[Tensor, ...]:
    """The fields of `ClusterAttention` for c of the centroids."""
    groups = centroid.unflatten(1, (keys.key.shape[1], -1))  # (B, K, G, c, D)
    scores = (groups * keys.scale).flatten(2, 3) @ keys.key.mT  # (B, K, G c, M)
    pad = None if keys.mask is None else ~keys.mask[:, None, None, :]
    weights = _softmax(scores, pad)
    with torch.no_grad():
        scores = scores if pad is None else scores.masked_fill(pad, -math.inf)
        top, level = _top_indices(scores, topk), scores.amax(-1)
        most = weights.amax(-1)  # e^0 / total
        level, total = level.masked_fill(most == 0, 0), (1 / most).masked_fill(most == 0, 0)
        ordered = _ascending(top, keys.mask, keys.key.shape[2])
    mass = weights.gather(-1, top).sum(-1)
    rest = weights.scatter(-1, top, 0.0) @ keys.value
    return tuple(t.unflatten(2, groups.shape[2:4]).flatten(1, 2) for t in (rest, mass, level, total, ordered))


def _top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores (..., M) of each row; the first of equal ones, which `topk` does not guarantee."""
    if count == 0:
        return scores.new_zeros(*scores.shape[:-1], 0, dtype=torch.int64)
    value, index = scores.topk(count)
    least = value[..., -1:]
    above = value > least
    nth = torch.arange(1, count + 1, dtype=torch.int32, device=scores.device)
    nth = nth - above.sum(-1, keepdim=True, dtype=torch.int32)  # among the scores equal to the least
    tied = torch.searchsorted((scores == least).cumsum(-1, dtype=torch.int32), nth)
    return torch.where(above, index, tied.clamp(max=scores.shape[-1] - 1))  # clamp: no score equals a NaN


def _ascending(top: Tensor, mask: Tensor | None, keys: int) -> Tensor:
    """The real ones of the top keys (B, K, G c, k) in ascending order, then -1."""
    if mask is not None:
        is_real = mask[:, None, :].expand(-1, top.shape[1], -1).gather(-1, top.flatten(2)).view_as(top)
        top = top.masked_fill(~is_real, keys)
    top = top.sort(-1).values
    return top.masked_fill(top == keys, -1).to(torch.int32)


@dataclass(frozen=True)
class _Blocks:
    """Queries ordered by cluster, in blocks of one cluster each; the last places of a block may be unused."""

    cluster: Tensor  # (B, H, g)
    query: Tensor  # (B, H, g, b): the query at each place
    unused: Tensor  # (B, H, g, b) bool
    place: Tensor  # (B, H, N): the place of each query among the g b places


def _blocks(assignment: Tensor, clusters: int) -> _Blocks:
    batch, heads, queries = assignment.shape
    size = 3 * math.isqrt(queries // clusters) - 2  # a compromise between few blocks and few unused places
    blocks = (queries + clusters * (size - 1)) // size  # at most

    def count(n: int) -> Tensor:
        return torch.arange(n, device=assignment.device).repeat(batch, heads, 1)

    order = assignment.argsort(dim=-1, stable=True)
    ordered = assignment.gather(-1, order)
    end = torch.searchsorted(ordered, count(clusters), right=True)  # (B, H, C), in `order`
    start = F.pad(end[..., :-1], (1, 0))
    last = ((end - start + size - 1) // size).cumsum(-1)  # (B, H, C), in blocks
    first = F.pad(last[..., :-1], (1, 0))

    cluster = torch.searchsorted(last, count(blocks), right=True).clamp(max=clusters - 1)
    begin = start.gather(-1, cluster) + (count(blocks) - first.gather(-1, cluster)) * size  # (B, H, g), in `order`
    position = begin.unsqueeze(-1) + torch.arange(size, device=order.device)  # (B, H, g, b)
    unused = position >= end.gather(-1, cluster).unsqueeze(-1)
    query = order.gather(-1, position.clamp(max=queries - 1).flatten(2)).unflatten(2, (blocks, size))
    place = torch.zeros_like(order).scatter(-1, order, count(queries) + (first * size - start).gather(-1, ordered))
    return _Blocks(cluster, query, unused, place)


def _attend_top_keys(query: Tensor, keys: _Keys, shared: ClusterAttention, blocks: _Blocks, at_once: bool) -> Tensor:
    """Exact attention of queries (B, H, N, D) to the top keys of their clusters, plus the shared rest: (B, H, N, Dv)."""
    batch, heads, number, size = blocks.query.shape
    row = batch * heads * (size + shared.top.shape[-1]) * (query.shape[-1] + keys.value.shape[-1])
    lengths = piece_lengths(number, row, at_once)
    pieces = zip(*(t.split(lengths, 2) for t in (blocks.cluster, blocks.query, blocks.unused)), strict=True)
    out = torch.cat([_attend_blocks(query, keys, shared, *piece) for piece in pieces], dim=2)  # (B, H, g, b, Dv)
    return gather_rows(out.flatten(2, 3), blocks.place)


def _attend_blocks(
    query: Tensor, keys: _Keys, shared: ClusterAttention, cluster: Tensor, index: Tensor, unused: Tensor
) -> Tensor:
    """Some of the blocks: their clusters (B, H, g), their queries (B, H, g, b), and which of these are unused."""
    q = gather_rows(query, index.flatten(2)).unflatten(2, index.shape[2:])  # (B, H, g, b, D)
    q = q.masked_fill(unused.unsqueeze(-1), 0)
    top = gather_rows(shared.top, cluster).unflatten(1, (keys.key.shape[1], -1))  # (B, K, G, g, k)
    flat = top.flatten(2).clamp(min=0).to(torch.int64)
    key, value = (gather_rows(x, flat).unflatten(2, top.shape[2:]).flatten(1, 2) for x in (keys.key, keys.value))
    pad = None if keys.mask is None else (top < 0).flatten(1, 2).unsqueeze(-2)  # (B, H, g, 1, k)
    exact = _softmax(q * keys.scale @ key.mT, pad) @ value  # (B, H, g, b, Dv)
    return exact * gather_rows(shared.mass.unsqueeze(-1), cluster).unsqueeze(-2) + gather_rows(shared.rest, cluster).unsqueeze(
        -2
    )


def _softmax(scores: Tensor, pad: Tensor | None) -> Tensor:
    """Over the last dimension; 0 at pads, also where all are pads."""
    if pad is None:
        return scores.softmax(-1)
    left_out = pad & ~pad.all(-1, keepdim=True)  # no infinity less infinity where all are pads
    return scores.masked_fill(left_out, -math.inf).softmax(-1).masked_fill(pad, 0)
