"""The clustered engine: similar queries share one row of attention weights, and each recomputes its largest ones.

    o_i = m_c sum_(j in T_c) softmax_(j in T_c)(s q_i . k_j) v_j + sum_(j not in T_c) A_cj v_j,    m_c = sum_(j in T_c) A_cj

for query i of cluster c. A_c is the softmax over keys of the mean of the cluster's queries, T_c its *top keys*: the k keys of
largest A_c.

Clusters come from k-means on codes of +1 and -1. Queries are then arranged in blocks of one cluster each, so that a block
attends to the top keys of its cluster in one small product. Cost: O(N C bits) time for each iteration of k-means, and O((C M +
N k) (D + Dv)). The PyTorch fallback forms the weights (C, M) a piece at a time, unless gradients are recorded; the compiled
kernel never stores them for the backward pass.

B batch, H query heads, K key-value heads, G = H / K query heads per key-value head, N queries, M keys, D channels, Dv value
channels, C clusters, g blocks of b queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.call import Call
from subquad.masks import zero_pads
from subquad.ops import clustered as compiled
from subquad.ops.clustered import ClusterAttention, ClusteredInputs
from subquad.ops.dispatch import can_use_compiled
from subquad.ops.double_backward import recomputed_gradients
from subquad.ops.precision import needs_gradient, upcast

# Numbers computed at a time: few enough to stay in cache, enough for operations to outweigh the overhead of calls.
_PIECE = 2**19


def attend(call: Call, projection: Tensor, *, clusters: int, iterations: int, topk: int) -> Tensor:
    """The output (B, H, N, Dv), for queries clustered by the signs of projection (bits, D).

    With as many queries as keys, the padding mask applies to the queries too: their pads do not influence the clusters.
    """
    query, queries, keys = call.query, call.query.shape[2], call.key.shape[2]
    if queries == 0 or keys == 0:
        return query.new_zeros(*query.shape[:3], call.value.shape[-1]) + call.value.sum()  # 0, and keeps the autograd graph
    mask, real = call.key_padding_mask, call.key_padding_mask if queries == keys else None
    clusters, topk, scale = min(clusters, queries), min(topk, keys), call.softmax_scale
    q = upcast(query)
    assignment = assign(q @ projection.to(q.dtype).mT, real, clusters, iterations)  # (B, H, N)
    key, value = (zero_pads(x.to(q.dtype), mask) for x in (call.key, call.value))
    inputs = ClusteredInputs(q, key, value, assignment, mask, real)
    if not can_use_compiled(*inputs):
        return _attend_with_pytorch(inputs, clusters, topk, scale).to(query.dtype)
    if needs_gradient(q, key, value):
        return _CompiledAttention.apply(clusters, topk, scale, *inputs)[0].to(query.dtype)  # type: ignore[no-untyped-call]
    return compiled.forward(inputs, clusters, topk, scale)[0].to(query.dtype)


@torch.no_grad()
def assign(x: Tensor, real: Tensor | None, clusters: int, iterations: int) -> Tensor:
    """The clusters (B, H, N) of the signs of x (B, H, N, bits), by k-means in Hamming space.

    Only the `real` (B, N) codes influence clusters. In a row with n of them, the initial centroids are those of rank
    floor(c n / C), where C is `clusters`, or n if that is smaller.
    """
    if can_use_compiled(x, real):
        return compiled.assign(x, real, clusters, iterations)
    code = _sign(x)
    first, precedence = _initial_centroids(code, real, clusters)
    centroid = _gather_rows(code, first)  # (B, H, C, bits)
    members = zero_pads(F.pad(code, (0, 1), value=1.0), real)  # the last column counts
    for _ in range(iterations):
        total = _sum_rows(members, _nearest(code, centroid, precedence), clusters)
        centroid = torch.where(total[..., -1:] > 0, _sign(total[..., :-1]), centroid)
    return _nearest(code, centroid, precedence)


class _CompiledAttention(torch.autograd.Function):
    """The output, and what the queries of a cluster share. The backward pass recomputes the weights."""

    @staticmethod
    def forward(clusters: int, topk: int, scale: float, *inputs: Tensor) -> tuple[Tensor, ...]:
        out, shared = compiled.forward(ClusteredInputs(*inputs), clusters, topk, scale)
        return out, *shared

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *ctx.options, query, key, value, assignment, mask, real = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(query, key, value, assignment, mask, real, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once: checkpointing refuses a second time
        inputs, shared = ClusteredInputs(*saved[:6]), ClusterAttention(*saved[6:])
        clusters, topk, scale = ctx.options
        if torch.is_grad_enabled():
            run = partial(_attend_with_pytorch, inputs, clusters, topk, scale)
            found: Any = recomputed_gradients(run, inputs[:3], ctx.needs_input_grad[3:6], grad)
        else:
            found = compiled.backward(grad, inputs, shared, scale)
        return None, None, None, *found, None, None, None


def _attend_with_pytorch(inputs: ClusteredInputs, clusters: int, topk: int, scale: float) -> Tensor:
    query, key, value, assignment, mask, real = inputs
    at_once = needs_gradient(query, key, value)
    count = _sum_rows(zero_pads(torch.ones_like(query[..., :1]), real), assignment, clusters)
    centroid = _sum_rows(zero_pads(query, real), assignment, clusters) / count.clamp(min=1)  # (B, H, C, D)
    keys = _Keys(key, value, mask, scale)
    shared = _attend_centroids(centroid, keys, topk, at_once)
    if not topk:
        return _gather_rows(shared.rest, assignment)
    return _attend_top_keys(query, keys, shared, _blocks(assignment, clusters), at_once)


def _initial_centroids(code: Tensor, real: Tensor | None, clusters: int) -> tuple[Tensor, Tensor]:
    """Which codes are the initial centroids (B, H, C), and the precedence of clusters (C,) or (B, 1, 1, C), see `_nearest`."""
    batch, heads, queries, bits = code.shape
    rank = torch.arange(clusters, device=code.device)
    integer = torch.int32 if 3 * (bits + 1) * clusters < 2**31 else torch.int64  # the former is faster
    precedence = (clusters - 1 - rank).to(integer)
    if real is None:
        return (rank * queries // clusters).expand(batch, heads, clusters), precedence
    n = real.sum(-1, keepdim=True)  # (B, 1)
    count = n.clamp(max=clusters)
    first = torch.searchsorted(real.cumsum(-1), rank * n // count.clamp(min=1) + 1).clamp(max=queries - 1)  # (B, C)
    unused = (rank >= count)[:, None, None]
    precedence = torch.where(unused, precedence - (2 * bits + 1) * clusters, precedence)  # below all used clusters
    return first.unsqueeze(1).expand(batch, heads, clusters), precedence


def _nearest(code: Tensor, centroid: Tensor, precedence: Tensor) -> Tensor:
    """The nearest centroid (B, H, N), the first of equally near ones.

    The integers C (code . centroid_c) + precedence_c, with precedence_c = C - 1 - c modulo C, are all different, so their
    maximum identifies the centroid; `amax` is much faster than `argmax`.
    """
    nearest = []
    clusters = centroid.shape[2]
    lengths = _piece_lengths(code.shape[2], code.shape[0] * code.shape[1] * clusters, at_once=False)
    for piece in code.split(lengths, dim=2):
        agreement = (piece @ centroid.mT).to(precedence.dtype)  # (B, H, n, C)
        nearest.append(clusters - 1 - torch.add(precedence, agreement, alpha=clusters).amax(-1) % clusters)
    return torch.cat(nearest, dim=2).to(torch.int64)


@dataclass(frozen=True)
class _Keys:
    """Keys and values, 0 in pads, and the factor on q . k."""

    key: Tensor
    value: Tensor
    mask: Tensor | None  # (B, M)
    scale: float


@dataclass(frozen=True)
class _Shared:
    """What the queries of a cluster share."""

    top: Tensor  # (B, H, C, k): T_c
    mass: Tensor  # (B, H, C, 1): m_c
    rest: Tensor  # (B, H, C, Dv): the sum over all other keys


def _attend_centroids(centroid: Tensor, keys: _Keys, topk: int, at_once: bool) -> _Shared:
    """Attention of the centroids (B, H, C, D)."""
    row = centroid.shape[0] * centroid.shape[1] * keys.key.shape[2]
    pieces = centroid.split(_piece_lengths(centroid.shape[2], row, at_once), dim=2)
    found = zip(*(_attend_centroid_piece(piece, keys, topk) for piece in pieces), strict=True)
    return _Shared(*(torch.cat(tensors, dim=2) for tensors in found))


def _attend_centroid_piece(centroid: Tensor, keys: _Keys, topk: int) -> tuple[Tensor, ...]:
    """The fields of `_Shared` for c of the centroids."""
    groups = centroid.unflatten(1, (keys.key.shape[1], -1))  # (B, K, G, c, D)
    scores = (groups * keys.scale).flatten(2, 3) @ keys.key.mT  # (B, K, G c, M)
    pad = None if keys.mask is None else ~keys.mask[:, None, None, :]
    weights = _softmax(scores, pad)
    top = _top_indices(scores.detach() if pad is None else scores.detach().masked_fill(pad, -math.inf), topk)
    mass = weights.gather(-1, top).sum(-1, keepdim=True)
    rest = weights.scatter(-1, top, 0.0) @ keys.value
    return tuple(t.unflatten(2, groups.shape[2:4]).flatten(1, 2) for t in (top, mass, rest))


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


def _attend_top_keys(query: Tensor, keys: _Keys, shared: _Shared, blocks: _Blocks, at_once: bool) -> Tensor:
    """Exact attention of queries (B, H, N, D) to the top keys of their clusters, plus the shared rest: (B, H, N, Dv)."""
    batch, heads, number, size = blocks.query.shape
    row = batch * heads * (size + shared.top.shape[-1]) * (query.shape[-1] + keys.value.shape[-1])
    lengths = _piece_lengths(number, row, at_once)
    pieces = zip(*(t.split(lengths, 2) for t in (blocks.cluster, blocks.query, blocks.unused)), strict=True)
    out = torch.cat([_attend_blocks(query, keys, shared, *piece) for piece in pieces], dim=2)  # (B, H, g, b, Dv)
    return _gather_rows(out.flatten(2, 3), blocks.place)


def _attend_blocks(query: Tensor, keys: _Keys, shared: _Shared, cluster: Tensor, index: Tensor, unused: Tensor) -> Tensor:
    """Some of the blocks: their clusters (B, H, g), their queries (B, H, g, b), and which of these are unused."""
    q = _gather_rows(query, index.flatten(2)).unflatten(2, index.shape[2:])  # (B, H, g, b, D)
    q = q.masked_fill(unused.unsqueeze(-1), 0)
    top = _gather_rows(shared.top, cluster).unflatten(1, (keys.key.shape[1], -1))  # (B, K, G, g, k)
    flat = top.flatten(2)
    key, value = (_gather_rows(x, flat).unflatten(2, top.shape[2:]).flatten(1, 2) for x in (keys.key, keys.value))
    pad = None
    if keys.mask is not None:  # a row may have fewer than k real keys
        mask = keys.mask.unsqueeze(1).expand(-1, top.shape[1], -1).gather(-1, flat)
        pad = ~mask.unflatten(2, top.shape[2:]).flatten(1, 2).unsqueeze(-2)  # (B, H, g, 1, k)
    exact = _softmax(q * keys.scale @ key.mT, pad) @ value  # (B, H, g, b, Dv)
    return exact * _gather_rows(shared.mass, cluster).unsqueeze(-2) + _gather_rows(shared.rest, cluster).unsqueeze(-2)


def _sign(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def _softmax(scores: Tensor, pad: Tensor | None) -> Tensor:
    """Over the last dimension; 0 at pads, also where all are pads."""
    if pad is None:
        return scores.softmax(-1)
    left_out = pad & ~pad.all(-1, keepdim=True)  # no infinity less infinity where all are pads
    return scores.masked_fill(left_out, -math.inf).softmax(-1).masked_fill(pad, 0)


def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, H, n, D) at index (B, H, m): (B, H, m, D)."""
    return x.flatten(0, 2).index_select(0, _flat_index(index, x.shape[2])).view(*index.shape, x.shape[-1])


def _sum_rows(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Rows of x (B, H, m, D) summed by index (B, H, m), which is below `count`: (B, H, count, D)."""
    batch, heads, _, dim = x.shape
    sums = x.new_zeros(batch * heads * count, dim).index_add(0, _flat_index(index, count), x.flatten(0, 2))
    return sums.view(batch, heads, count, dim)


def _flat_index(index: Tensor, count: int) -> Tensor:
    """Index (B, H, m) into `count` rows of each head, as one into all B H count rows."""
    batch, heads, _ = index.shape
    start = torch.arange(batch * heads, device=index.device) * count
    return (index + start.view(batch, heads, 1)).flatten()


def _piece_lengths(length: int, row: int, at_once: bool) -> list[int]:
    """The lengths of pieces of about `_PIECE` numbers, `row` numbers per step; a single piece if `at_once` or compiled."""
    piece = length if at_once or torch.compiler.is_compiling() else max(_PIECE // max(row, 1), 1)
    return [min(piece, length - start) for start in range(0, length, piece)]
