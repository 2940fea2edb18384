"""The clustered engine: similar queries share one row of attention weights, and each sets its largest ones anew.

    o_i = m_c sum_(j in T_c) softmax_(j in T_c)(s q_i . k_j) v_j + sum_(j not in T_c) A_cj v_j,    m_c = sum_(j in T_c) A_cj

for query i of cluster c. A_c is the softmax over keys of the mean of the cluster's queries, T_c the k keys of largest A_c.

Clusters come from k-means on codes of +1 and -1. Queries are then laid out in blocks of one cluster each, so that a block
meets the k keys of its cluster in one small product. Cost: O(N C bits) time for each iteration of k-means, and
O((C M + N k) (D + Dv)); the weights (C, M), like all else, are formed in pieces where no gradient is recorded. On CPUs compiled
loops do the work where they can, and keep no weights for the backward pass either.

B batch, H query heads, K key-value heads, G = H / K queries a group, N queries, M keys, D channels, Dv value channels,
C clusters, g blocks of b queries.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.masks import zero_pads
from subquad.ops import clustered as compiled
from subquad.ops import dispatch
from subquad.ops.double_backward import recomputed_gradients
from subquad.ops.precision import needs_gradient, upcast

# Numbers worked on at a time: so few that they stay in cache, so many that the operations outweigh their calls.
_PIECE = 2**19


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    *,
    clusters: int,
    iterations: int,
    topk: int,
    scale: float,
    key_padding_mask: Tensor | None,
) -> Tensor:
    """Attention of query (B, H, N, D) to key (B, K, M, D), value (B, K, M, Dv), clustered by projection (bits, D).

    Where there are as many queries as keys, the pads are taken for pads of the queries too: they shape no cluster.
    """
    queries, keys = query.shape[2], key.shape[2]
    if queries == 0 or keys == 0:
        return query.new_zeros(*query.shape[:3], value.shape[-1]) + value.sum()  # 0, and the graph is kept
    real = key_padding_mask if queries == keys else None
    q = upcast(query)
    assignment = assign(q @ projection.to(q.dtype).mT, real, min(clusters, queries), iterations)  # (B, H, N)
    key, value = (zero_pads(x.to(q.dtype), key_padding_mask) for x in (key, value))
    given = (q, key, value, assignment, key_padding_mask, real)
    sizes = _Sizes(min(clusters, queries), min(topk, keys), scale)
    if not dispatch.can_use_compiled(*given):
        return _by_pytorch(*given, sizes).to(query.dtype)
    if needs_gradient(q, key, value):
        return _Compiled.apply(*given, sizes)[0].to(query.dtype)  # type: ignore[no-untyped-call]
    return compiled.forward(*given, **asdict(sizes))[0].to(query.dtype)


@torch.no_grad()
def assign(x: Tensor, real: Tensor | None, clusters: int, iterations: int) -> Tensor:
    """The cluster (B, H, N) of the codes that are the signs of x (B, H, N, bits), by k-means in Hamming space.

    Only the `real` (B, N) codes shape clusters. A row of n of them starts from those of rank floor(c n / C), C being `clusters`
    or n if that is less.
    """
    if dispatch.can_use_compiled(x, real):
        return compiled.assign(x, real, clusters, iterations)
    code = _sign(x)
    first, precedence = _start(code, real, clusters)
    centroid = _rows(code, first)  # (B, H, C, bits)
    members = zero_pads(F.pad(code, (0, 1), value=1.0), real)  # the last column counts
    for _ in range(iterations):
        total = _sums(members, _nearest(code, centroid, precedence), clusters)
        centroid = torch.where(total[..., -1:] > 0, _sign(total[..., :-1]), centroid)
    return _nearest(code, centroid, precedence)


@dataclass(frozen=True)
class _Sizes:
    """C, k, and the factor on q . k."""

    clusters: int
    topk: int
    scale: float


class _Compiled(torch.autograd.Function):
    """The output, and what queries share. What was given is kept besides; the weights are computed again."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        assignment: Tensor,
        mask: Tensor | None,
        real: Tensor | None,
        sizes: _Sizes,
    ) -> tuple[Tensor, ...]:
        return compiled.forward(query, key, value, assignment, mask, real, **asdict(sizes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.sizes = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return *compiled.backward(grad, *ctx.saved_tensors, scale=ctx.sizes.scale), None, None, None, None
        query, key, value, assignment, mask, real = ctx.saved_tensors[:6]
        run = partial(_by_pytorch, query, key, value, assignment, mask, real, ctx.sizes)
        return *recomputed_gradients(run, (query, key, value), ctx.needs_input_grad[:3], grad), None, None, None, None


def _by_pytorch(
    query: Tensor, key: Tensor, value: Tensor, assignment: Tensor, mask: Tensor | None, real: Tensor | None, sizes: _Sizes
) -> Tensor:
    whole = needs_gradient(query, key, value)
    count = _sums(zero_pads(torch.ones_like(query[..., :1]), real), assignment, sizes.clusters)
    centroid = _sums(zero_pads(query, real), assignment, sizes.clusters) / count.clamp(min=1)  # (B, H, C, D)
    source = _Source(key, value, mask, sizes.scale)
    shared = _share(centroid, source, sizes.topk, whole)
    if not sizes.topk:
        return _rows(shared.rest, assignment)
    return _meet(query, source, shared, _blocks(assignment, sizes.clusters), whole)


def _start(code: Tensor, real: Tensor | None, clusters: int) -> tuple[Tensor, Tensor]:
    """Which codes are the first centroids (B, H, C), and the precedence of clusters (C,) or (B, 1, 1, C), see `_nearest`."""
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
    precedence = torch.where(unused, precedence - (2 * bits + 1) * clusters, precedence)  # below all that are used
    return first.unsqueeze(1).expand(batch, heads, clusters), precedence


def _nearest(code: Tensor, centroid: Tensor, precedence: Tensor) -> Tensor:
    """The nearest centroid (B, H, N), of equally near ones the first.

    The integers C (code . centroid_c) + precedence_c, with precedence_c = C - 1 - c modulo C, all differ, so that their maximum
    tells which it is; `amax` is much faster than `argmax`.
    """
    nearest = []
    clusters = centroid.shape[2]
    for part in code.split(_lengths(code.shape[2], code.shape[0] * code.shape[1] * clusters, whole=False), dim=2):
        agreement = (part @ centroid.mT).to(precedence.dtype)  # (B, H, n, C)
        nearest.append(clusters - 1 - torch.add(precedence, agreement, alpha=clusters).amax(-1) % clusters)
    return torch.cat(nearest, dim=2).to(torch.int64)


@dataclass(frozen=True)
class _Source:
    """Keys and values, 0 in pads, and the factor on q . k."""

    key: Tensor
    value: Tensor
    mask: Tensor | None  # (B, M)
    scale: float


@dataclass(frozen=True)
class _Shared:
    """What all queries of a cluster have in common."""

    top: Tensor  # (B, H, C, k): T_c
    mass: Tensor  # (B, H, C, 1): m_c
    rest: Tensor  # (B, H, C, Dv): the sum over all other keys


def _share(centroid: Tensor, source: _Source, topk: int, whole: bool) -> _Shared:
    """Attention of the centroids (B, H, C, D)."""
    row = centroid.shape[0] * centroid.shape[1] * source.key.shape[2]
    parts = centroid.split(_lengths(centroid.shape[2], row, whole), dim=2)
    pieces = zip(*(_share_piece(part, source, topk) for part in parts), strict=True)
    return _Shared(*(torch.cat(piece, dim=2) for piece in pieces))


def _share_piece(centroid: Tensor, source: _Source, topk: int) -> tuple[Tensor, ...]:
    """The parts of `_Shared` for c of the centroids."""
    groups = centroid.unflatten(1, (source.key.shape[1], -1))  # (B, K, G, c, D)
    scores = (groups * source.scale).flatten(2, 3) @ source.key.mT  # (B, K, G c, M)
    pad = None if source.mask is None else ~source.mask[:, None, None, :]
    weights = _softmax(scores, pad)
    top = _largest(scores.detach() if pad is None else scores.detach().masked_fill(pad, -math.inf), topk)
    mass = weights.gather(-1, top).sum(-1, keepdim=True)
    rest = weights.scatter(-1, top, 0.0) @ source.value
    return tuple(t.unflatten(2, groups.shape[2:4]).flatten(1, 2) for t in (top, mass, rest))


def _largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores (..., M) of each row; of equal ones the first, which `topk` does not promise."""
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
    """Queries ordered by cluster, in blocks of one cluster each, whose last places may be free."""

    cluster: Tensor  # (B, H, g)
    query: Tensor  # (B, H, g, b): who stands there
    free: Tensor  # (B, H, g, b) bool
    place: Tensor  # (B, H, N): where a query stands among the g b places


def _blocks(assignment: Tensor, clusters: int) -> _Blocks:
    batch, heads, queries = assignment.shape
    size = 3 * math.isqrt(queries // clusters) - 2  # few blocks, and few free places
    blocks = (queries + clusters * (size - 1)) // size  # as many as there can be

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
    free = position >= end.gather(-1, cluster).unsqueeze(-1)
    query = order.gather(-1, position.clamp(max=queries - 1).flatten(2)).unflatten(2, (blocks, size))
    place = torch.zeros_like(order).scatter(-1, order, count(queries) + (first * size - start).gather(-1, ordered))
    return _Blocks(cluster, query, free, place)


def _meet(query: Tensor, source: _Source, shared: _Shared, blocks: _Blocks, whole: bool) -> Tensor:
    """Queries (B, H, N, D) with the keys of their clusters: (B, H, N, Dv)."""
    batch, heads, number, size = blocks.query.shape
    row = batch * heads * (size + shared.top.shape[-1]) * (query.shape[-1] + source.value.shape[-1])
    lengths = _lengths(number, row, whole)
    parts = zip(*(t.split(lengths, 2) for t in (blocks.cluster, blocks.query, blocks.free)), strict=True)
    out = torch.cat([_meet_piece(query, source, shared, *part) for part in parts], dim=2)  # (B, H, g, b, Dv)
    return _rows(out.flatten(2, 3), blocks.place)


def _meet_piece(query: Tensor, source: _Source, shared: _Shared, cluster: Tensor, who: Tensor, free: Tensor) -> Tensor:
    q = _rows(query, who.flatten(2)).unflatten(2, who.shape[2:]).masked_fill(free.unsqueeze(-1), 0)  # (B, H, g, b, D)
    top = _rows(shared.top, cluster).unflatten(1, (source.key.shape[1], -1))  # (B, K, G, g, k)
    index = top.flatten(2)
    key, value = (_rows(x, index).unflatten(2, top.shape[2:]).flatten(1, 2) for x in (source.key, source.value))
    pad = None
    if source.mask is not None:  # where a row has fewer than k keys
        mask = source.mask.unsqueeze(1).expand(-1, top.shape[1], -1).gather(-1, index)
        pad = ~mask.unflatten(2, top.shape[2:]).flatten(1, 2).unsqueeze(-2)  # (B, H, g, 1, k)
    exact = _softmax(q * source.scale @ key.mT, pad) @ value  # (B, H, g, b, Dv)
    return exact * _rows(shared.mass, cluster).unsqueeze(-2) + _rows(shared.rest, cluster).unsqueeze(-2)


def _sign(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def _softmax(scores: Tensor, pad: Tensor | None) -> Tensor:
    """Over the last dimension, 0 at pads, and all 0 where there is nothing else."""
    if pad is None:
        return scores.softmax(-1)
    return scores.masked_fill(pad, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(pad, 0)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, H, n, D) at index (B, H, m): (B, H, m, D)."""
    return x.flatten(0, 2).index_select(0, _flat(index, x.shape[2])).view(*index.shape, x.shape[-1])


def _sums(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Rows of x (B, H, m, D) summed by index (B, H, m), which is below `count`: (B, H, count, D)."""
    batch, heads, _, dim = x.shape
    sums = x.new_zeros(batch * heads * count, dim).index_add(0, _flat(index, count), x.flatten(0, 2))
    return sums.view(batch, heads, count, dim)


def _flat(index: Tensor, count: int) -> Tensor:
    """Index (B, H, m) into `count` rows of each head, as one into all B H count rows."""
    batch, heads, _ = index.shape
    start = torch.arange(batch * heads, device=index.device) * count
    return (index + start.view(batch, heads, 1)).flatten()


def _lengths(length: int, row: int, whole: bool) -> list[int]:
    """Pieces of about `_PIECE` numbers, where each step has `row`; one, if `whole` or compiled."""
    piece = length if whole or torch.compiler.is_compiling() else max(_PIECE // max(row, 1), 1)
    return [min(piece, length - start) for start in range(0, length, piece)]
