"""The hybrid engine: exact softmax terms for near keys and kernelized ones for far keys, under one denominator.

    o_i = sum_j w_ij v_j / sum_j w_ij,    w_ij = e^(s q_i . k_j)           where key j is near, at most `window` steps away,
                                          w_ij = g phi(q_i) . phi(k_j)     where it is far

over all j, or over j <= i when causal; phi >= 0, g > 0. Both kinds of weights are taken relative to e^(c_i),

    c_i = max(largest near score, log of the sum of the far weights),

which cancels. Nothing overflows, and the larger kind of weights keeps its precision. Far weights whose sum underflows count as
0.

Each chunk of C queries is compared pair by pair with the keys of its span: its own keys, the `window` keys before them and,
unless causal, the `window` keys after them. Some of these are near for a query, the others far. All keys outside the span enter
through sums of phi(k) v^T over the keys before it and over the keys after it, which are added and never subtracted.
Cost: O(N (C + window) (D + m + Dv) + N m Dv) time, and one (m, Dv) sum per chunk. A sequence no longer than one span is one
chunk, with no keys outside its span.

A decode state keeps the last `window` keys and values, and the sums over all keys before them. The kept keys stand in front of
those of the tokens that continue it. A window that is longer than the sequence costs no more than the sequence. Positions count
real tokens only; the queries of pads give 0.

B batch, H query heads, K key-value heads, G = H / K query heads per key-value head, n tokens, L keys with those of the state, D
channels, Dv value channels, m features, c chunks of C tokens, W keys of a chunk's span.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.state_spec import Rows, StateSpec, TensorSpec
from subquad.masks import put_back, real_first, take_tokens, zero_pads
from subquad.ops.feature_map import FeatureMap
from subquad.ops.kernelized import Sums
from subquad.ops.kernelized.chunk_weights import CHUNK
from subquad.ops.kernelized.pytorch import scan
from subquad.ops.precision import compute_dtype, needs_gradient, upcast
from subquad.state import StateTensors

_PIECE_PAIRS = 2**20  # query-key pairs processed at a time, if autograd records nothing
_SHORT = 256  # the longest sequence whose pairs may all be processed at a time
_ROOM = 256  # the room of a state grows by as many rows, up to the window


@dataclass(frozen=True, kw_only=True)
class HybridRule:
    """How near and far keys are weighed.

    Args:
        feature_map: phi >= 0, of queries (B, H, n, D) and keys (B, K, n, D); phi = f, with b None.
        log_mix: (H,), log g.
        scale: s.
        window: the largest distance of a near key.
    """

    feature_map: FeatureMap
    log_mix: Tensor
    scale: float
    window: int


@dataclass(frozen=True)
class _Keys:
    """Consecutive keys, those of the state first."""

    key: Tensor  # (B, K, L, D)
    phi: Tensor  # (B, K, L, m), 0 for pads
    value: Tensor  # (B, K, L, Dv + 1), with a column of ones
    real: Tensor  # (B, L) bool

    def padded(self, length: int) -> _Keys:
        more = length - self.real.shape[1]
        key, phi, value = (F.pad(x, (0, 0, 0, more)) for x in (self.key, self.phi, self.value))
        return _Keys(key, phi, value, F.pad(self.real, (0, more)))

    def sums(self, start: int, chunks: int, size: int) -> Tensor:
        """phi(k) v^T over each chunk of `size` keys, the first of which starts at `start`: (B, K, c, m, Dv + 1)."""
        phi, value = (x[:, :, start : start + chunks * size].unflatten(2, (chunks, size)) for x in (self.phi, self.value))
        return phi.mT @ value

    def spans(self, first: int, chunks: int, size: int, width: int) -> _Keys:
        """The `width` keys in the span of each chunk of `size` queries, as (B, K, c, W, ...) and real (B, c, W)."""
        if chunks == 1 and width == self.real.shape[1]:
            return _Keys(self.key.unsqueeze(2), self.phi.unsqueeze(2), self.value.unsqueeze(2), self.real.unsqueeze(1))
        rows = slice(first * size, (first + chunks - 1) * size + width)
        key, phi, value = (x[:, :, rows].unfold(2, width, size).mT for x in (self.key, self.phi, self.value))
        return _Keys(key, phi, value, self.real[:, rows].unfold(1, width, size))


def attend(call: Call, rule: HybridRule) -> tuple[Tensor, StateTensors | None]:
    """The output (B, H, n, Dv) and, with `return_state`, the state."""
    mask, past = call.key_padding_mask, call.past
    query, key, value = (zero_pads(x, mask) for x in (call.query, call.key, call.value))
    order, real = None, torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    if mask is not None:
        order, real = real_first(mask)
        query, key, value = (take_tokens(x, order) for x in (query, key, value))
    span = CHUNK + rule.window * (1 if call.is_causal else 2)
    is_short = past is None and not call.return_state and key.shape[2] <= min(span, _SHORT)
    capacity = 0 if is_short else min(rule.window, key.shape[2])
    if past is not None or call.return_state:
        capacity = room(rule, call.seen + key.shape[2])
    state = _empty_state(key, value, rule, capacity) if past is None else _with_room(dict(past), capacity)  # type: ignore[arg-type]
    keys = _join(state, key, value, real, rule)
    out = _output(query, keys, None if is_short else state["S"], rule, call.is_causal)
    if order is not None:
        out = put_back(out.masked_fill(~real[:, None, :, None], 0), order)
    return out.to(query.dtype), _next_state(state, keys, real, mask is not None) if call.return_state else None


def room(rule: HybridRule, seen: int) -> int:
    """For how many keys a state after `seen` tokens has room."""
    return min(rule.window, _ROOM * (seen // _ROOM + 1))


def state_spec(call: Call, rule: HybridRule) -> StateSpec:
    """See `_empty_state`."""
    kv_heads, kept = call.key.shape[1], Rows(rule.window, least=min(rule.window, call.seen))
    return {
        "S": TensorSpec((kv_heads, rule.feature_map.features, call.value.shape[3] + 1), compute_dtype(call.value)),
        "key": TensorSpec((kv_heads, kept, call.key.shape[3]), call.key.dtype),
        "value": TensorSpec((kv_heads, kept, call.value.shape[3]), call.value.dtype),
        "count": TensorSpec((), torch.int64, range=(0, min(rule.window, call.seen))),
    }


def _empty_state(key: Tensor, value: Tensor, rule: HybridRule, capacity: int) -> Sums:
    """The state before the first token, with room for `capacity` keys.

    S (B, K, m, Dv + 1); key (B, K, w, D) and value (B, K, w, Dv), the newest last; count (B,), how many of them are filled.
    """
    heads, width = key.shape[:2], value.shape[3]
    return {
        "S": upcast(value).new_zeros(*heads, rule.feature_map.features, width + 1),
        "key": key.new_zeros(*heads, capacity, key.shape[3]),
        "value": value.new_zeros(*heads, capacity, width),
        "count": torch.zeros(key.shape[0], dtype=torch.int64, device=key.device),
    }


def _with_room(state: Sums, capacity: int) -> Sums:
    """The state with room for at least `capacity` keys."""
    more = capacity - state["key"].shape[2]
    if more <= 0:
        return state
    return {**state, **{name: F.pad(state[name], (0, 0, more, 0)) for name in ("key", "value")}}


def _join(state: Sums, key: Tensor, value: Tensor, real: Tensor, rule: HybridRule) -> _Keys:
    """The kept keys of the state, then the new ones."""
    capacity = state["key"].shape[2]
    kept = torch.arange(capacity, device=key.device) >= capacity - state["count"][:, None]
    real = torch.cat([kept, real], dim=1)
    key, value = (upcast(torch.cat(pair, dim=2)) for pair in ((state["key"], key), (state["value"], value)))
    phi, _ = rule.feature_map.key(key)
    assert phi is not None
    ones = value.new_ones(*value.shape[:3], 1)
    return _Keys(key, phi * real[:, None, :, None], torch.cat([value, ones], dim=-1), real)


def _output(query: Tensor, keys: _Keys, S: Tensor | None, rule: HybridRule, is_causal: bool) -> Tensor:
    """(B, H, n, Dv) for queries at the positions of the last n keys; S are the sums over what lies before all keys.

    Without S, all queries are one chunk, and its span has all keys.
    """
    length = query.shape[2]
    if not length:
        return query[..., :1].expand(*query.shape[:3], keys.value.shape[-1] - 1)
    size = length if S is None else min(CHUNK, length)
    chunks, front = -(-length // size), keys.key.shape[2] - length
    extra = front if is_causal else 2 * front  # keys of a span beyond the chunk's own
    query = F.pad(upcast(query), (0, 0, 0, chunks * size - length))
    keys = keys.padded(chunks * size + extra)
    outside = None if S is None else _sums_outside(keys, S, chunks, size, extra, is_causal)

    at_once, given = chunks, (query, keys.key, keys.phi, keys.value, rule.log_mix, S)
    if not needs_gradient(*given) and not torch.compiler.is_compiling():
        at_once = max(_PIECE_PAIRS // max(query.shape[0] * query.shape[1] * size * (size + extra), 1), 1)
    offset = torch.arange(size, device=query.device)[:, None] + front - torch.arange(size + extra, device=query.device)  # i - j
    outs = []
    for first in range(0, chunks, at_once):
        count = min(at_once, chunks - first)
        piece = query[:, :, first * size : (first + count) * size]
        spans = keys.spans(first, count, size, size + extra)
        piece_sums = None if outside is None else outside[:, :, first : first + count]
        outs.append(_attend_chunks(piece, spans, piece_sums, offset, rule, is_causal))
    return torch.cat(outs, dim=2)[:, :, :length]


def _sums_outside(keys: _Keys, S: Tensor, chunks: int, size: int, extra: int, is_causal: bool) -> Tensor:
    """(B, K, c, m, Dv + 1), the sums over the keys outside the span of each chunk."""
    before, _ = scan(S, keys.sums(0, chunks, size), None)
    if is_causal:
        return before
    after, _ = scan(torch.zeros_like(S), keys.sums(extra, chunks, size).flip(2), None)
    return before + after.flip(2)


def _attend_chunks(
    query: Tensor, keys: _Keys, outside: Tensor | None, offset: Tensor, rule: HybridRule, is_causal: bool
) -> Tensor:
    """Chunks of queries (B, H, c C, D) over the keys of their spans and the sums outside; `offset` (C, W) is i - j."""
    size, shape = offset.shape[0], keys.key.shape[1:3]  # (K, c)

    def by_chunk(x: Tensor) -> Tensor:
        return x.unflatten(2, (shape[1], -1)).unflatten(1, (shape[0], -1)).transpose(2, 3)  # (B, K, c, G, C, ...)

    def times(x: Tensor, y: Tensor) -> Tensor:
        return (x.flatten(3, 4) @ y).unflatten(3, x.shape[3:5])

    near = (offset.abs() <= rule.window) & keys.real[:, None, :, None, None]  # (B, 1, c, 1, C, W)
    far = offset.abs() > rule.window
    phi, value = keys.phi, keys.value.contiguous()
    if is_causal:
        near, far = near & (offset >= 0), far & (offset > 0)
        phi, far = phi[..., :size, :], far[:, :size]  # a causal query has far keys among the first C of the span only

    fq = by_chunk(rule.feature_map.query(query))
    pairs = times(fq, phi.contiguous().mT).masked_fill(~far, 0)
    distant = times(pairs, value[..., : phi.shape[3], :])  # (B, K, c, G, C, Dv + 1)
    if outside is not None:
        distant = distant + times(fq, outside)
    scores = times(by_chunk(query * rule.scale), keys.key.contiguous().mT).masked_fill(~near, -math.inf)

    total = distant.detach()[..., -1:]
    has_far = total >= torch.finfo(total.dtype).tiny
    log_mix = rule.log_mix.to(total.dtype).reshape(shape[0], 1, -1, 1, 1)  # (K, 1, G, 1, 1)
    top = (log_mix.detach() + total.log()).masked_fill(~has_far, -math.inf).maximum(scores.detach().amax(-1, keepdim=True))
    top = top.masked_fill(top == -math.inf, 0)
    factor = (log_mix - top).masked_fill(~has_far, -math.inf).exp()

    out = times(scores.sub_(top).exp_(), value).addcmul(distant, factor)
    out, denominators = out[..., :-1], out[..., -1:]
    out = out / denominators.masked_fill(denominators == 0, 1)
    return out.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B, H, c C, Dv)


def _next_state(state: Sums, keys: _Keys, real: Tensor, has_pads: bool) -> StateTensors:
    """The state for later tokens: the last keys, and the sums with the keys that have left the window added."""
    capacity, length = state["key"].shape[2], real.shape[1]
    count = real.sum(1)
    leaving = torch.arange(length, device=count.device) < count[:, None]
    phi = keys.phi[:, :, :length] * leaving[:, None, :, None]
    index = count[:, None] + torch.arange(capacity, device=count.device)
    kept = (x[:, :, length:].clone() if not has_pads else take_tokens(x, index) for x in (keys.key, keys.value[..., :-1]))
    key, value = (x.to(state[name].dtype) for name, x in zip(("key", "value"), kept, strict=True))
    return {
        "S": state["S"] + phi.mT @ keys.value[:, :, :length],
        "key": key,
        "value": value,
        "count": (state["count"] + count).clamp(max=capacity),
    }
