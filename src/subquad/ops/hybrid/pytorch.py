"""Hybrid attention in PyTorch, in chunks of queries.

Each chunk of C queries is compared pair by pair with the keys of its span: its own keys, the `window` keys before them and,
unless causal, the `window` keys after them. Some of these are near for a query, the others far. All keys outside the span enter
through sums of phi(k) v^T over the keys before it and over the keys after it, which are added and never subtracted.
Cost: O(N (C + window) (D + m + Dv) + N m Dv) time, and one (m, Dv) sum per chunk. A sequence no longer than one span is one
chunk, with no keys outside its span. A window that is longer than the sequence costs no more than the sequence.

B batch, H query heads, K key-value heads, G = H / K query heads per key-value head, n tokens, L keys with those of a state, D
channels, Dv value channels, P channels of a projected query or key, m features, c chunks of C tokens, W keys of a chunk's span.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.hybrid.rule import HybridRule, Inputs
from subquad.ops.kernelized.chunk_weights import CHUNK
from subquad.ops.kernelized.pytorch import scan
from subquad.ops.precision import needs_gradient, upcast

_PIECE_PAIRS = 2**20  # query-key pairs processed at a time, if autograd records nothing
_SHORT = 256  # the longest sequence whose pairs may all be processed at a time


class Queries(NamedTuple):
    """Queries at the positions of the last n keys."""

    query: Tensor  # (B, H, n, D)
    projected: Tensor  # (B, H, n, P)
    log_mix: Tensor  # (H,) or (B, H)


@dataclass(frozen=True)
class Keys:
    """Consecutive keys, those of a state first."""

    key: Tensor  # (B, K, L, D)
    phi: Tensor  # (B, K, L, m), 0 for pads
    value: Tensor  # (B, K, L, Dv + 1), with a column of ones
    real: Tensor  # (B, L) bool

    @staticmethod
    def of(key: Tensor, value: Tensor, projected: Tensor, real: Tensor, rule: HybridRule) -> Keys:
        key, value, projected = (upcast(x) for x in (key, value, projected))
        phi, _ = rule.feature_map(projected.shape[-1]).key(projected)
        assert phi is not None
        ones = value.new_ones(*value.shape[:3], 1)
        return Keys(key, phi * real[:, None, :, None], torch.cat([value, ones], dim=-1), real)

    def padded(self, before: int, after: int) -> Keys:
        """With so many pads before and after them."""
        key, phi, value = (F.pad(x, (0, 0, before, after)) for x in (self.key, self.phi, self.value))
        return Keys(key, phi, value, F.pad(self.real, (before, after)))

    def sums(self, start: int, chunks: int, size: int) -> Tensor:
        """phi(k) v^T over each chunk of `size` keys, the first of which starts at `start`: (B, K, c, m, Dv + 1)."""
        phi, value = (x[:, :, start : start + chunks * size].unflatten(2, (chunks, size)) for x in (self.phi, self.value))
        return phi.mT @ value

    def spans(self, first: int, chunks: int, size: int, width: int) -> Keys:
        """The `width` keys in the span of each chunk of `size` queries, as (B, K, c, W, ...) and real (B, c, W)."""
        if chunks == 1 and width == self.real.shape[1]:
            return Keys(self.key.unsqueeze(2), self.phi.unsqueeze(2), self.value.unsqueeze(2), self.real.unsqueeze(1))
        rows = slice(first * size, (first + chunks - 1) * size + width)
        key, phi, value = (x[:, :, rows].unfold(2, width, size).mT for x in (self.key, self.phi, self.value))
        return Keys(key, phi, value, self.real[:, rows].unfold(1, width, size))


class Results(NamedTuple):
    """The output, and the weights it is a mean with, relative to e^top: `top` is 0 for a query that attends to nothing."""

    out: Tensor  # (B, H, n, Dv)
    top: Tensor  # (B, H, n)
    total: Tensor  # (B, H, n), the sum of all weights relative to e^top
    far: Tensor  # (B, H, n), the sum of phi(q) . phi(k) over far keys, 0 if it underflows


def attend(inputs: Inputs, rule: HybridRule) -> Results:
    """Attention over one sequence, without a state."""
    key, length = inputs.key, inputs.key.shape[2]
    real = torch.ones(key.shape[0], length, dtype=torch.bool, device=key.device) if inputs.mask is None else inputs.mask
    keys, S = Keys.of(key, inputs.value, inputs.projected_key, real, rule), None
    if length > min(CHUNK + rule.window * (1 if rule.is_causal else 2), _SHORT):
        keys = keys.padded(min(rule.window, length), 0)
        S = keys.value.new_zeros(*key.shape[:2], keys.phi.shape[-1], keys.value.shape[-1])
    return attend_to(Queries(inputs.query, inputs.projected_query, inputs.log_mix), keys, S, rule)


def attend_to(queries: Queries, keys: Keys, S: Tensor | None, rule: HybridRule) -> Results:
    """S (B, K, m, Dv + 1) are the sums over what lies before all keys.

    Without S, all queries are one chunk, and its span has all keys.
    """
    query, projected = upcast(queries.query), upcast(queries.projected)
    length = query.shape[2]
    if not length:
        nothing = query.new_zeros(query.shape[:3])
        # Of the queries, and so recorded.
        return Results(query[..., :1].expand(*query.shape[:3], keys.value.shape[-1] - 1), nothing, nothing, nothing)
    size = length if S is None else min(CHUNK, length)
    chunks, front = -(-length // size), keys.key.shape[2] - length
    extra = front if rule.is_causal else 2 * front  # keys of a span beyond the chunk's own
    query, projected = (F.pad(x, (0, 0, 0, chunks * size - length)) for x in (query, projected))
    keys = keys.padded(0, chunks * size + extra - keys.key.shape[2])
    outside = None if S is None else _sums_outside(keys, S, chunks, size, extra, rule.is_causal)

    at_once, given = chunks, (query, projected, keys.key, keys.phi, keys.value, queries.log_mix, S)
    if not needs_gradient(*given) and not torch.compiler.is_compiling():
        at_once = max(_PIECE_PAIRS // max(query.shape[0] * query.shape[1] * size * (size + extra), 1), 1)
    offset = torch.arange(size, device=query.device)[:, None] + front - torch.arange(size + extra, device=query.device)  # i - j
    pieces = []
    for first in range(0, chunks, at_once):
        count = min(at_once, chunks - first)
        rows = slice(first * size, (first + count) * size)
        piece = Queries(query[:, :, rows], projected[:, :, rows], queries.log_mix)
        spans = keys.spans(first, count, size, size + extra)
        piece_sums = None if outside is None else outside[:, :, first : first + count]
        pieces.append(_attend_chunks(piece, spans, piece_sums, offset, rule))
    return Results(*(torch.cat(parts, dim=2)[:, :, :length] for parts in zip(*pieces, strict=True)))


def _sums_outside(keys: Keys, S: Tensor, chunks: int, size: int, extra: int, is_causal: bool) -> Tensor:
    """(B, K, c, m, Dv + 1), the sums over the keys outside the span of each chunk."""
    before, _ = scan(S, keys.sums(0, chunks, size), None)
    if is_causal:
        return before
    after, _ = scan(torch.zeros_like(S), keys.sums(extra, chunks, size).flip(2), None)
    return before + after.flip(2)


def _attend_chunks(queries: Queries, keys: Keys, outside: Tensor | None, offset: Tensor, rule: HybridRule) -> Results:
    """Chunks of queries (B, H, c C, D) over the keys of their spans and the sums outside; `offset` (C, W) is i - j."""
    size, shape = offset.shape[0], keys.key.shape[1:3]  # (K, c)

    def by_chunk(x: Tensor) -> Tensor:
        return x.unflatten(2, (shape[1], -1)).unflatten(1, (shape[0], -1)).transpose(2, 3)  # (B, K, c, G, C, ...)

    def by_head(x: Tensor) -> Tensor:
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B, H, c C, ...)

    def times(x: Tensor, y: Tensor) -> Tensor:
        return (x.flatten(3, 4) @ y).unflatten(3, x.shape[3:5])

    near = (offset.abs() <= rule.window) & keys.real[:, None, :, None, None]  # (B, 1, c, 1, C, W)
    far = offset.abs() > rule.window
    phi, value = keys.phi, keys.value.contiguous()
    if rule.is_causal:
        near, far = near & (offset >= 0), far & (offset > 0)
        phi, far = phi[..., :size, :], far[:, :size]  # a causal query has far keys among the first C of the span only

    fq = by_chunk(rule.feature_map(queries.projected.shape[-1]).query(queries.projected))
    pairs = times(fq, phi.contiguous().mT).masked_fill(~far, 0)
    distant = times(pairs, value[..., : phi.shape[3], :])  # (B, K, c, G, C, Dv + 1)
    if outside is not None:
        distant = distant + times(fq, outside)
    scores = times(by_chunk(queries.query * rule.scale), keys.key.contiguous().mT).masked_fill(~near, -math.inf)

    total = distant.detach()[..., -1:]
    has_far = total >= torch.finfo(total.dtype).tiny
    log_mix = queries.log_mix.to(total.dtype)
    log_mix = log_mix.unflatten(-1, (shape[0], 1, -1, 1, 1))  # (K, 1, G, 1, 1) or (B, K, 1, G, 1, 1)
    top = (log_mix.detach() + total.log()).masked_fill(~has_far, -math.inf).maximum(scores.detach().amax(-1, keepdim=True))
    top = top.masked_fill(top == -math.inf, 0)
    factor = (log_mix - top).masked_fill(~has_far, -math.inf).exp()

    out = times(scores.sub_(top).exp_(), value).addcmul(distant, factor)
    out, denominators = out[..., :-1], out[..., -1:]
    out = out / denominators.masked_fill(denominators == 0, 1)
    return Results(by_head(out), *(by_head(x.squeeze(-1)) for x in (top, denominators.detach(), total * has_far)))
