"""Kernelized attention in PyTorch: the body of the operator for every device, and of feature maps that no kernel has.

    o_i = phi(q_i) S_i / (phi(q_i) . z_i),    S_i = sum_j phi(k_j) v_j^T,    z_i = sum_j phi(k_j)

Values carry a column of ones, so that z is the last column of S. A map may give phi in two factors, `phi(k_j) = e^(b_j) f_j`.
The sums are then kept relative to a running level of b, so that nothing overflows and no early key vanishes behind a later one.

Causal sums are computed chunk by chunk. Queries and keys of one chunk are compared in a small masked product; everything before
the chunk enters through the sums. Cost: O(N (C + m) Dv) time for chunks of C tokens, and one (m, Dv) sum per chunk.

B batch, H query heads, K key-value heads, G = H / K query heads per key-value head, N queries, M keys, D channels, Dv value
channels, m features, n tokens of a piece, c chunks of C tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.errors import InputError
from subquad.masks import zero_pads
from subquad.ops.kernelized.chunk_weights import (
    CHUNK,
    NO_LEVEL,
    Weights,
    decayed,
    equal,
    levelled_by_channel,
    levelled_by_chunk,
    levelled_by_key,
)
from subquad.ops.kernelized.rule import Inputs, KernelizedRule, Sums
from subquad.ops.precision import compute_dtype, needs_gradient, upcast

# A long sequence is processed in pieces: small enough to stay in cache, large enough that calls into PyTorch cost little.
_PIECE_FEATURES = 2**18  # features per piece, but
_MIN_PIECE_ROWS = 2**11  # at least this many rows, that is tokens times heads


def attend_to_few(inputs: Inputs, rule: KernelizedRule) -> Tensor:
    """The output (B, H, N, Dv), from the weight of each pair."""
    keys = _map_keys(_Tokens(inputs.key, inputs.value, inputs.mask, None, rule.write), rule)
    groups = upcast(inputs.query).unflatten(1, (inputs.key.shape[1], -1))  # (B, K, G, N, D)
    assert keys.f is not None
    weights = rule.feature_map.query(rule.feature_map.project(groups.flatten(2, 3))) @ keys.f.mT  # (B, K, G N, M)
    if keys.b is not None:
        top = keys.b.detach().amax(2, keepdim=True)
        weights = weights * (keys.b - top.masked_fill(top == NO_LEVEL, 0)).exp().mT
    out, _ = _normalize(weights @ keys.value, None, rule)
    return _by_head(out, groups)


def attend(inputs: Inputs, rule: KernelizedRule, sums: Sums) -> tuple[Tensor, Tensor]:
    """The output (B, H, N, Dv) and its denominators (B, H, N, 1); adds the keys to `sums` in place."""
    query, tokens = inputs.query, _Tokens(inputs.key, inputs.value, inputs.mask, rule.log_decay, rule.write)
    # A single query sees every key, its own included.
    run = _causal if inputs.is_causal and query.shape[2] != 1 else _bidirectional
    given = (*inputs[:3], rule.log_decay, rule.write, *rule.feature_map.weights)
    if needs_gradient(*given) or torch.compiler.is_compiling():  # autograd keeps every intermediate anyway: one piece
        pieces = run(query, tokens, rule, sums, max(query.shape[2], inputs.key.shape[2], 1))
        outs, denominators = zip(*pieces, strict=True)
        return torch.cat(outs, dim=2), torch.cat(denominators, dim=2)
    rows = max(_PIECE_FEATURES // rule.feature_map.features, _MIN_PIECE_ROWS)
    chunks = rows // max(query.shape[0] * query.shape[1] * CHUNK, 1)
    dtype = compute_dtype(query)
    out = query.new_empty(*query.shape[:3], inputs.value.shape[-1], dtype=dtype)
    total, start = query.new_empty(*query.shape[:3], 1, dtype=dtype), 0
    for piece, divisors in run(query, tokens, rule, sums, max(chunks, 1) * CHUNK):
        end = start + piece.shape[2]
        out[:, :, start:end], total[:, :, start:end] = piece, divisors
        start = end
    return out, total


@dataclass(frozen=True)
class _Tokens:
    """Keys and values, with the mask, decay and write strength of each."""

    key: Tensor
    value: Tensor
    mask: Tensor | None
    log_decay: Tensor | None
    write: Tensor | None

    def split(self, lengths: list[int]) -> Iterator[_Tokens]:
        def pieces(x: Tensor | None, dim: int) -> Any:
            return [None] * len(lengths) if x is None else x.split(lengths, dim)

        of_heads = (pieces(x, 2) for x in (self.log_decay, self.write))
        return map(_Tokens, pieces(self.key, 2), pieces(self.value, 2), pieces(self.mask, 1), *of_heads)


@dataclass(frozen=True)
class _Keys:
    """A piece of the keys, mapped: phi(k) = e^b f."""

    f: Tensor | None  # (B, K, n, m); None: 1, and b has the channels
    b: Tensor | None  # (B, K, n, 1 or m); None: 0
    value: Tensor  # (B, K, n, Dv + 1), or (B, K, n, Dv) without ones
    log_decay: Tensor | None  # (B, K, n, 1)
    real: Tensor | None  # (B, 1, n, 1) bool; None: no pads

    def weights(self, chunk: int, level: Tensor | None, *, causal: bool) -> Weights:
        """The weights in chunks of `chunk` tokens. If not causal, only the sums at the end of each chunk matter."""
        f, b, log_decay = (None if t is None else t.unflatten(2, (-1, chunk)) for t in (self.f, self.b, self.log_decay))
        if b is None:
            assert f is not None
            return equal(f) if log_decay is None else decayed(f, log_decay)
        assert level is not None
        if not causal:
            return levelled_by_chunk(f, b, level)
        return levelled_by_channel(b, level) if f is None else levelled_by_key(f, b, level)

    def count(self) -> Tensor:
        """(B or 1, 1, n, 1): 1 for each real key."""
        return self.value.new_ones(1, 1, self.value.shape[2], 1) if self.real is None else self.real.to(self.value.dtype)


def _map_keys(tokens: _Tokens, rule: KernelizedRule) -> _Keys:
    f, b = rule.feature_map.key(rule.feature_map.project(zero_pads(upcast(tokens.key), tokens.mask)))
    if b is not None and (tokens.log_decay is not None or tokens.write is not None):
        raise InputError("log_decay and write need a feature map phi = f; got a map that gives phi = e^b f.")
    value = zero_pads(upcast(tokens.value), tokens.mask)
    if rule.has_ones:
        value = torch.cat([value, value.new_ones(*value.shape[:-1], 1)], dim=-1)
    log_decay = None if tokens.log_decay is None else tokens.log_decay.unsqueeze(-1)
    if f is not None and tokens.write is not None:
        f = f * tokens.write.unsqueeze(-1)
    if tokens.mask is None:
        return _Keys(f, b, value, log_decay, None)
    real = tokens.mask[:, None, :, None]
    if b is not None:
        b = b.masked_fill(~real, NO_LEVEL)  # below every real key
    elif f is not None:
        f = f * real
    log_decay = None if log_decay is None else log_decay.masked_fill(~real, 0.0)
    return _Keys(f, b, value, log_decay, real)


def _bidirectional(
    query: Tensor, tokens: _Tokens, rule: KernelizedRule, sums: Sums, piece: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for part in tokens.split(_piece_lengths(tokens.key.shape[2], piece)):
        _add_keys(_map_keys(part, rule), rule, sums)
    S = sums["S"]
    if rule.normalizer == "channel":
        S = S / _nonzero(S[..., -1:])
    for part in query.split(_piece_lengths(query.shape[2], piece), dim=2):
        groups = upcast(part).unflatten(1, (tokens.key.shape[1], -1))  # (B, K, G, n, D)
        out = rule.feature_map.query(rule.feature_map.project(groups.flatten(2, 3))) @ S  # (B, K, G n, Dv + 1)
        out, denominators = _normalize(out, sums.get("count"), rule)
        yield _by_head(out, groups), _by_head(denominators, groups)  # (B, H, n, Dv) and (B, H, n, 1)


def _by_head(x: Tensor, groups: Tensor) -> Tensor:
    """x (B, K, G n, ...) -> (B, H, n, ...), for queries `groups` (B, K, G, n, D)."""
    return x.unflatten(2, groups.shape[2:4]).flatten(1, 2)


def _add_keys(keys: _Keys, rule: KernelizedRule, sums: Sums) -> None:
    """Add a piece of the keys to the sums; their level rises where a key is above it."""
    if not sums:
        sums |= _zero_sums(keys, rule)
    if keys.value.shape[2] == 0:
        return
    weights = keys.weights(keys.value.shape[2], sums.get("level"), causal=False)
    if weights.level is not None:
        sums["level"] = weights.level
    _, sums["S"] = scan(sums["S"], weights.sums(keys.value.unsqueeze(2)), weights.decay)
    if "count" in sums:
        sums["count"] = sums["count"] + keys.count().sum(-2, keepdim=True)


def _causal(query: Tensor, tokens: _Tokens, rule: KernelizedRule, sums: Sums, piece: int) -> Iterator[tuple[Tensor, Tensor]]:
    lengths = _piece_lengths(query.shape[2], piece)
    for part, keys in zip(query.split(lengths, dim=2), tokens.split(lengths), strict=True):
        yield _causal_piece(upcast(part), _map_keys(keys, rule), rule, sums)


def _causal_piece(query: Tensor, keys: _Keys, rule: KernelizedRule, sums: Sums) -> tuple[Tensor, Tensor]:
    """Outputs and denominators of queries (B, H, n, D) over the sums so far and the keys up to their own, which are added."""
    if not sums:
        sums |= _zero_sums(keys, rule)
    if query.shape[2] == 0:
        return query[..., :1].expand(*query.shape[:3], keys.value.shape[-1] - rule.has_ones), query[..., :1]
    weights = keys.weights(min(CHUNK, query.shape[2]), sums.get("level"), causal=True)
    value = keys.value.unflatten(2, (-1, weights.chunk))  # (B, K, c, C, Dv + 1)
    grouped = query.unflatten(2, (-1, weights.chunk)).unflatten(1, (value.shape[1], -1)).transpose(2, 3)  # (B, K, c, G, C, D)
    feature_map = rule.feature_map
    fq = feature_map.query(feature_map.project(grouped.flatten(2, 4))).unflatten(2, grouped.shape[2:5])  # (B, K, c, G, C, m)

    S, sums["S"] = scan(sums["S"], weights.sums(value), weights.decay)  # S (B, K, c, m, Dv + 1), before each chunk
    if weights.level is not None:
        sums["level"] = weights.level
    if rule.normalizer == "channel":
        total = weights.total(S[..., -1:].mT)  # (B, K, c, C, m)
        fq = fq / (total if keys.real is None else _nonzero(total)).unsqueeze(3)
    scores, past = weights.scores(fq), weights.read(fq, S)  # (B, K, c, G, C, C) and (B, K, c, G, C, Dv + 1)
    rows = [t.flatten(3, 4).flatten(0, 2) for t in (past, scores)]
    out = rows[0].baddbmm_(rows[1], value.flatten(0, 2)).view(past.shape)

    count = None
    if "count" in sums:
        running = sums["count"] + keys.count().cumsum(-2)  # (B, 1, n, 1)
        sums["count"] = running[:, :, -1:]
        count = running.unflatten(2, (-1, 1, weights.chunk))
    out, denominators = _normalize(out, count, rule)
    return out.transpose(2, 3).flatten(3, 4).flatten(1, 2), denominators.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def scan(total: Tensor, added: Tensor, decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """`total <- decay total + added`, chunk by chunk: the totals before each chunk (B, K, c, m, Dv + 1), and after the last."""
    totals = []
    decays = [None] * added.shape[2] if decay is None else decay.mT.unbind(2)
    for new, factor in zip(added.unbind(2), decays, strict=True):
        totals.append(total)
        total = total + new if factor is None else torch.addcmul(new, total, factor)
    return torch.stack(totals, dim=2), total


def _zero_sums(keys: _Keys, rule: KernelizedRule) -> Sums:
    """The sums over no keys."""
    batch, kv_heads, _, width = keys.value.shape
    sums = {"S": keys.value.new_zeros(batch, kv_heads, rule.feature_map.features, width)}
    if rule.normalizer == "mean":
        sums["count"] = keys.value.new_zeros(batch, 1, 1, 1)
    if keys.b is not None:
        sums["level"] = keys.b.new_full((batch, kv_heads, 1, keys.b.shape[-1]), NO_LEVEL)
    return sums


def _normalize(out: Tensor, count: Tensor | None, rule: KernelizedRule) -> tuple[Tensor, Tensor]:
    """out (..., Dv + 1) -> (..., Dv), 0 for queries that may attend to nothing, and the denominators (..., 1)."""
    if count is not None:
        denominators = _nonzero(count).expand(*out.shape[:-1], 1)
        return out / denominators, denominators
    if not rule.has_ones:
        return out, out.new_ones(*out.shape[:-1], 1)
    out, denominators = out[..., :-1], out[..., -1:]
    if rule.normalizer == "channel":
        return out, torch.ones_like(denominators)
    if rule.normalizer == "signed":
        floor = torch.full_like(denominators, rule.floor).copysign(denominators)
        denominators = torch.where(denominators.abs() < rule.floor, floor, denominators)
    denominators = _nonzero(denominators)
    return out / denominators, denominators


def _nonzero(denominators: Tensor) -> Tensor:
    """1 in place of 0: a sum over nothing then stays 0."""
    return denominators.masked_fill(denominators == 0, 1.0)


def _piece_lengths(length: int, piece: int) -> list[int]:
    """Pieces of whole chunks, then the rest."""
    tail = length % CHUNK
    lengths = [piece] * ((length - tail) // piece)
    rest = (length - tail) % piece
    return [n for n in (*lengths, rest, tail) if n] or [0]
