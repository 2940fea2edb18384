"""The kernelized engine: attention as sums over keys, never over pairs.

    o_i = phi(q_i) S_i / (phi(q_i) . z_i),    S_i = sum_j phi(k_j) v_j^T,    z_i = sum_j phi(k_j)

over all keys j, or over j <= i when causal. A map may give phi in two factors, `phi(k_j) = e^(b_j) f_j`: the sums are then
kept relative to a running level of `b`, so that nothing overflows and no early key vanishes behind a later one.

Causal sums go chunk by chunk. Inside a chunk, queries meet keys in a small masked product; what lies before the chunk
enters through the state. Cost: O(N (C + m) Dv) time for chunks of C, one (m, Dv) state a chunk.

B batch, H query heads, K key-value heads, G = H / K queries a group, N queries, M keys, D channels, Dv value channels,
m features, c chunks of C tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from subquad.masks import causal, zero_pads
from subquad.state import Parts

Map = Callable[[Tensor], tuple[Tensor, Tensor | None]]
Normalizer = Literal["sum", "signed", "mean", "none", "channel"]

_CHUNK = 64  # tokens of the masked product inside a chunk
_EXACT_CHUNK = 16  # where every channel has a level of its own at every token: a product of size C * C * m
_PIECE = 2**17  # features worked on at a time, so that they stay in cache
_SAFE_RISE = 60.0  # e^60 and e^-60 are far inside float32
_WITH_Z = ("sum", "signed", "channel")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernelized mechanism, as the engine sees it.

    Args:
        query, key: maps of (B, K, n, D) to (f, b), phi = e^b f. f is (B, K, n, m); b is None (zero), (B, K, n, 1), or
            (B, K, n, m) with the normalizer "channel". The b of a query cancels, and is not used, except without normalizer.
        features: m.
        normalizer: "sum" divides by phi(q) . z; "signed" likewise, its magnitude held above `floor`, for maps with negative
            features; "mean" by the number of keys; "channel" divides every feature of the query by its own z; "none" not at all.
        floor: see "signed".
        log_gate: (B, K, M), log g: `S <- g S + (1 - g) phi(k) v^T` at every token. Causal only.
        learned: what the maps take gradients into, besides query and key.
    """

    query: Map
    key: Map
    features: int
    normalizer: Normalizer = "sum"
    floor: float = 0.0
    log_gate: Tensor | None = None
    learned: tuple[Tensor, ...] = ()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None = None,
    past: Parts | None = None,
    return_state: bool = False,
) -> tuple[Tensor, Parts | None]:
    """Attention of query (B, H, N, D) to key (B, K, M, D), value (B, K, M, Dv): output (B, H, N, Dv), and the sums."""
    sums: Sums = dict(past or {})  # type: ignore[arg-type]
    source = _Source(key, value, key_padding_mask, kernel.log_gate)
    walk = _causal if is_causal else _bidirectional
    if _whole(query, key, value, kernel.log_gate, *kernel.learned):
        pieces = walk(query, source, kernel, sums, max(query.shape[2], key.shape[2], 1))
        out = torch.cat(list(pieces), dim=2).to(query.dtype)
    else:
        rows = _PIECE // max(query.shape[0] * query.shape[1] * kernel.features, 1)
        out, start = query.new_empty(*query.shape[:3], value.shape[-1]), 0
        for piece in walk(query, source, kernel, sums, max(rows // _CHUNK, 1) * _CHUNK):
            out[:, :, start : (start := start + piece.shape[2])] = piece
    return out, sums if return_state else None


Sums = dict[str, Tensor]
# S (B, K, m, Dv); z (B, K, 1, m); level (B, K, 1, 1 or m), the largest b so far; count (B, 1, 1, 1), the keys so far.


@dataclass(frozen=True)
class _Source:
    """Keys and values, and what goes with each of them."""

    key: Tensor
    value: Tensor
    mask: Tensor | None
    log_gate: Tensor | None

    def split(self, lengths: list[int]) -> Iterator[_Source]:
        parts = [t.split(lengths, 2) for t in (self.key, self.value)]
        masks = self.mask.split(lengths, 1) if self.mask is not None else [None] * len(lengths)
        gates = self.log_gate.split(lengths, 2) if self.log_gate is not None else [None] * len(lengths)
        return map(_Source, *parts, masks, gates)


@dataclass(frozen=True)
class _Keys:
    """A piece of the source, mapped: phi(k) = e^b f."""

    f: Tensor  # (B, K, n, m), or (B, K, n, 1) where b has the channels
    b: Tensor | None  # (B, K, n, 1 or m)
    value: Tensor  # (B, K, n, Dv)
    log_gate: Tensor | None  # (B, K, n, 1)
    real: Tensor | None  # (B, 1, n, 1) bool; None: no pads

    def count(self) -> Tensor:
        """(B or 1, 1, n, 1): 1 for each real key."""
        return self.f.new_ones(1, 1, self.f.shape[2], 1) if self.real is None else self.real.to(self.f.dtype)


def _map_keys(source: _Source, kernel: Kernel) -> _Keys:
    mask = source.mask
    f, b = kernel.key(zero_pads(_widen(source.key), mask))
    value = zero_pads(_widen(source.value), mask)
    gate = source.log_gate.unsqueeze(-1) if source.log_gate is not None else None
    if gate is not None:
        f = f * -gate.expm1()  # S <- g S + (1 - g) phi(k) v^T
    if mask is None:
        return _Keys(f, b, value, gate, None)
    real = mask[:, None, :, None]
    f = f * real
    b = b.masked_fill(~real, _lowest(b)) if b is not None else None
    gate = gate.masked_fill(~real, 0.0) if gate is not None else None
    return _Keys(f, b, value, gate, real)


def _bidirectional(query: Tensor, source: _Source, kernel: Kernel, sums: Sums, piece: int) -> Iterator[Tensor]:
    for part in source.split(_lengths(source.key.shape[2], piece)):
        _absorb(_map_keys(part, kernel), kernel, sums)
    kv_heads = source.key.shape[1]
    for part in query.split(_lengths(query.shape[2], piece), dim=2):
        groups = _widen(part).unflatten(1, (kv_heads, -1))  # (B, K, G, n, D)
        fq, _ = kernel.query(groups.flatten(2, 3))  # (B, K, G n, m)
        if kernel.normalizer == "channel":
            out = fq @ (sums["S"] * _reciprocal(sums["z"]).mT)
        else:
            total = fq @ sums["z"].mT if "z" in sums else sums.get("count")
            out = _normalize(fq @ sums["S"], total, kernel)
        yield out.unflatten(2, groups.shape[2:4]).flatten(1, 2)  # (B, H, n, Dv)


def _absorb(keys: _Keys, kernel: Kernel, sums: Sums) -> None:
    """Add a piece of keys to the sums, and raise their level where a key stands above it."""
    if not sums:
        sums |= _nothing(keys, kernel)
    phi, decay = keys.f, None
    if keys.b is not None and keys.b.shape[2]:
        before = sums["level"]
        sums["level"] = torch.maximum(before, keys.b.detach().amax(2, keepdim=True))
        decay = (before - sums["level"]).exp().unsqueeze(2)  # (B, K, 1, 1, 1 or m)
        phi = keys.f * (keys.b - sums["level"]).exp()
    _, sums["S"] = _scan(sums["S"], (phi.mT @ keys.value).unsqueeze(2), decay, transposed=True)
    if "z" in sums:
        _, sums["z"] = _scan(sums["z"], phi.sum(-2, keepdim=True).unsqueeze(2), decay)
    if kernel.normalizer == "mean":
        sums["count"] = sums["count"] + keys.count().sum(-2, keepdim=True)


def _causal(query: Tensor, source: _Source, kernel: Kernel, sums: Sums, piece: int) -> Iterator[Tensor]:
    lengths = _lengths(query.shape[2], piece)
    for part, keys in zip(query.split(lengths, dim=2), source.split(lengths), strict=True):
        yield _causal_piece(_widen(part), _map_keys(keys, kernel), kernel, sums)


def _causal_piece(query: Tensor, keys: _Keys, kernel: Kernel, sums: Sums) -> Tensor:
    """Queries (B, H, n, D) over the sums so far and the keys up to their own; the sums take the keys in."""
    batch, heads, n, _ = query.shape
    kv_heads, normalizer = keys.value.shape[1], kernel.normalizer
    if not sums:
        sums |= _nothing(keys, kernel)
    if n == 0:
        return keys.value.new_empty(batch, heads, 0, keys.value.shape[-1])
    weights = _weigh(keys, sums.get("level"))
    chunk = weights.f.shape[3]
    grouped = query.unflatten(2, (-1, chunk)).unflatten(1, (kv_heads, -1)).transpose(2, 3)  # (B, K, c, G, C, D)
    fq, _ = kernel.query(grouped.flatten(2, 4))
    fq = fq.unflatten(2, grouped.shape[2:5])  # (B, K, c, G, C, m)
    value = keys.value.unflatten(2, (-1, chunk))  # (B, K, c, C, Dv)

    # S and z as each chunk finds them
    S, sums["S"] = _scan(sums["S"], weights.leaving.mT @ value, weights.decay, transposed=True)  # (B, K, c, m, Dv)
    if "z" in sums:
        z, sums["z"] = _scan(sums["z"], weights.leaving.sum(-2, keepdim=True), weights.decay)  # (B, K, c, 1, m)
    if weights.level is not None:
        sums["level"] = weights.level

    if normalizer == "channel":
        total = weights.within_sum() + (z if weights.since is None else weights.since * z)
        fq = fq * _reciprocal(total).unsqueeze(3)
    scores = weights.scores(fq).flatten(3, 4)  # (B, K, c, G C, C)
    if weights.since is not None:
        fq = fq * weights.since.unsqueeze(3)
    fq = fq.flatten(3, 4)  # (B, K, c, G C, m)
    out = fq @ S + scores @ value
    if normalizer in ("sum", "signed"):
        out = _normalize(out, fq @ z.mT + scores.sum(-1, keepdim=True), kernel)
    out = out.unflatten(3, grouped.shape[3:5])  # (B, K, c, G, C, Dv)
    if normalizer == "mean":
        count = sums["count"] + keys.count().cumsum(-2)  # (B, 1, n, 1)
        sums["count"] = count[:, :, -1:]
        out = _normalize(out, count.unflatten(2, (-1, 1, chunk)), kernel)
    return out.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B, H, n, Dv)


@dataclass(frozen=True)
class _Weights:
    """What each key of a chunk, and the sums before it, count for at each query of the chunk."""

    f: Tensor  # (B, K, c, C, m)
    within: Tensor | None = None  # (B, K, c, C, C, 1 or m): at query i, of key j. None: 1 for j <= i
    since: Tensor | None = None  # (B, K, c, C or 1, 1 or m): at query i, of the sums. None: 1
    level: Tensor | None = None  # (B, K, 1, 1 or m), after the last chunk

    @property
    def leaving(self) -> Tensor:
        """The keys as they enter the sums at the chunk's end."""
        return self.f if self.within is None else self.f * self.within[..., -1, :, :]

    @property
    def decay(self) -> Tensor | None:
        """What the sums before the chunk count for at its end: (B, K, c, 1, 1 or m)."""
        return None if self.since is None else self.since[..., -1:, :]

    def scores(self, fq: Tensor) -> Tensor:
        """fq (B, K, c, G, C, m) with the keys of its chunk: (B, K, c, G, C, C), 0 above the diagonal."""
        if self.within is not None and self.within.shape[-1] > 1:
            return (fq.unsqueeze(-2) * (self.within * self.f.unsqueeze(-3)).unsqueeze(3)).sum(-1)
        scores = (fq.flatten(3, 4) @ self.f.mT).unflatten(3, fq.shape[3:5])
        return scores.tril_() if self.within is None else scores * self.within.squeeze(-1).unsqueeze(3)

    def within_sum(self) -> Tensor:
        """sum_j within_ij f_j over the chunk: (B, K, c, C, m)."""
        if self.within is None:
            return self.f.cumsum(-2)
        return (self.within * self.f.unsqueeze(-3)).sum(-2)


def _weigh(keys: _Keys, level: Tensor | None) -> _Weights:
    chunked = (-1, min(_CHUNK, keys.f.shape[2]))
    f = keys.f.unflatten(2, chunked)
    if keys.log_gate is not None:
        return _gated(f, keys.log_gate.unflatten(2, chunked))
    if keys.b is None or level is None:
        return _Weights(f)
    b = keys.b.unflatten(2, chunked)
    if b.shape[-1] == 1:
        return _levelled(f, b, level)
    if (weights := _levelled_by_chunk(f, b, level)) is not None:
        return weights
    if f.shape[3] % _EXACT_CHUNK == 0:
        f, b = (t.flatten(2, 3).unflatten(2, (-1, _EXACT_CHUNK)) for t in (f, b))
    return _levelled(f, b, level)


def _levelled(f: Tensor, b: Tensor, level: Tensor) -> _Weights:
    """Relative to the largest b up to each query: every weight is at most 1, and at least one key's is 1."""
    top = torch.maximum(b.detach().flatten(2, 3).cummax(2).values, level).unflatten(2, b.shape[2:4])
    before, end = _before(top[..., -1:, :], level)
    future = ~causal(b.shape[3], b.shape[3], b.device).unsqueeze(-1)
    within = (b.unsqueeze(-3) - top.unsqueeze(-2)).masked_fill(future, -math.inf).exp()
    return _Weights(f, within, (before - top).exp(), end)


def _levelled_by_chunk(f: Tensor, b: Tensor, level: Tensor) -> _Weights | None:
    """Relative to the largest b of the chunk and before: one product for the chunk instead of one for each channel.

    None where some channel rises so far inside a chunk that its earlier keys would vanish, or where that can't be read.
    """
    if torch.compiler.is_compiling() or type(b.data) is not Tensor or b.is_meta:
        return None
    top = torch.maximum(b.detach().amax(3, keepdim=True).cummax(2).values, level.unsqueeze(2))
    before, end = _before(top, level)
    rise = top - torch.maximum(before, b.detach()[..., :1, :])  # from the chunk's first token on
    if rise.numel() and rise.max() > _SAFE_RISE:
        return None
    return _Weights(f * (b - top).exp(), None, (before - top).exp(), end)


def _gated(f: Tensor, log_gate: Tensor) -> _Weights:
    """Weights prod g_t over j < t <= i, summed in log space without subtracting running totals."""
    length = log_gate.shape[3]
    allowed = causal(length, length, f.device)
    later = allowed & ~torch.eye(length, dtype=torch.bool, device=f.device)  # t > j
    passed = log_gate.expand(*log_gate.shape[:-1], length).masked_fill(~later, 0.0).cumsum(-2)
    within = passed.masked_fill(~allowed, -math.inf).exp().unsqueeze(-1)
    return _Weights(f, within, log_gate.cumsum(-2).exp())


def _before(ends: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Levels at the end of each chunk (B, K, c, 1, x) -> levels before each chunk, and after the last (B, K, 1, x)."""
    return torch.cat([start.unsqueeze(2), ends[:, :, :-1]], dim=2), ends[:, :, -1]


def _scan(total: Tensor, added: Tensor, decay: Tensor | None, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """`total <- decay total + added`, chunk by chunk: the totals before each chunk (B, K, c, ...), and after the last."""
    totals = []
    decays = [None] * added.shape[2] if decay is None else (decay.mT if transposed else decay).unbind(2)
    for new, factor in zip(added.unbind(2), decays, strict=True):
        totals.append(total)
        total = total + new if factor is None else torch.addcmul(new, total, factor)
    return torch.stack(totals, dim=2), total


def _nothing(keys: _Keys, kernel: Kernel) -> Sums:
    """The sums over no keys."""
    batch, kv_heads, _, value_dim = keys.value.shape
    sums = {"S": keys.value.new_zeros(batch, kv_heads, kernel.features, value_dim)}
    if kernel.normalizer in _WITH_Z:
        sums["z"] = keys.value.new_zeros(batch, kv_heads, 1, kernel.features)
    if kernel.normalizer == "mean":
        sums["count"] = keys.value.new_zeros(batch, 1, 1, 1)
    if keys.b is not None:
        sums["level"] = keys.b.new_full((batch, kv_heads, 1, keys.b.shape[-1]), _lowest(keys.b))
    return sums


def _normalize(out: Tensor, total: Tensor | None, kernel: Kernel) -> Tensor:
    """out / total, and 0 where there was nothing to attend to."""
    if total is None:
        return out
    if kernel.normalizer == "signed":
        floor = torch.full_like(total, kernel.floor).copysign(total)
        return out / torch.where(total.abs() < kernel.floor, floor, total)
    return out / torch.where(total == 0, 1, total)


def _reciprocal(z: Tensor) -> Tensor:
    empty = z == 0
    return torch.where(empty, 0, 1 / torch.where(empty, 1, z))


def _lowest(x: Tensor) -> float:
    """A level below every b, whose differences stay finite."""
    return torch.finfo(x.dtype).min / 4


def _widen(x: Tensor) -> Tensor:
    """Sums are kept in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _whole(*tensors: Tensor | None) -> bool:
    """Whether to take the sequence in one piece: a recorded graph keeps every intermediate anyway."""
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return recorded or torch.compiler.is_compiling()


def _lengths(length: int, piece: int) -> list[int]:
    """Pieces of whole chunks, then what is left over."""
    tail = length % _CHUNK
    lengths = [piece] * ((length - tail) // piece)
    rest = (length - tail) % piece
    return [n for n in (*lengths, rest, tail) if n] or [0]
