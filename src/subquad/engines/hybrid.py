"""The hybrid engine: exact softmax terms for near keys and kernelized ones for far keys, under one denominator.

    o_i = sum_j w_ij v_j / sum_j w_ij,    w_ij = e^(s q_i . k_j)           where key j is near, at most `window` steps away,
                                          w_ij = g phi(q_i) . phi(k_j)     where it is far

over all j, or over j <= i when causal; phi >= 0, g > 0. Both kinds of weights are taken relative to e^(c_i),

    c_i = max(largest near score, log of the sum of the far weights),

which cancels: then nothing overflows, and what is larger counts. Far weights whose sum is below the number range count as 0.

A chunk of C queries meets, as pairs, its own keys, `window` more before them and, unless causal, `window` more after them: some
of these are near for a query, the others far. All keys beyond enter through sums of phi(k) v^T over what lies before, and over
what lies after, which are added and never subtracted. Cost: O(N (C + window) (D + m + Dv) + N m Dv) time, one (m, Dv) sum a
chunk. A sequence no longer than what a chunk would meet is one chunk, and nothing lies beyond.

A decode state keeps the last `window` keys and values, and the sums of what has left them. Tokens that go on from one meet the
kept keys in front of their own. Positions count real tokens only; the queries of pads give 0.

B batch, H query heads, K key-value heads, G = H / K queries a group, n tokens, L keys with those in front, D channels, Dv value
channels, m features, c chunks of C tokens, W keys that a chunk meets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.chunk_weights import CHUNK
from subquad.engines.kernelized import Sums, scan
from subquad.masks import put_back, real_first, take_tokens, zero_pads
from subquad.ops.precision import needs_gradient, upcast
from subquad.state import StateTensors

_PIECE = 2**20  # pairs worked on at a time, where no graph is recorded
_SHORT = 256  # tokens, at most, whose pairs are all worked on at a time


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What weighs near and far keys.

    Args:
        query, key: phi of queries (B, H, n, D) and keys (B, K, n, D): (..., m), at least 0.
        features: m.
        log_mix: (H,), log g.
        scale: s.
        window: how many steps away a near key is at most.
    """

    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    features: int
    log_mix: Tensor
    scale: float
    window: int


@dataclass(frozen=True)
class _Keys:
    """Keys in a row, those that a state has kept in front."""

    key: Tensor  # (B, K, L, D)
    phi: Tensor  # (B, K, L, m), 0 for what is none
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

    def met_by(self, first: int, chunks: int, size: int, width: int) -> _Keys:
        """The `width` keys that each chunk of `size` queries meets, as (B, K, c, W, ...) and real (B, c, W)."""
        if chunks == 1 and width == self.real.shape[1]:
            return _Keys(self.key.unsqueeze(2), self.phi.unsqueeze(2), self.value.unsqueeze(2), self.real.unsqueeze(1))
        rows = slice(first * size, (first + chunks - 1) * size + width)
        key, phi, value = (x[:, :, rows].unfold(2, width, size).mT for x in (self.key, self.phi, self.value))
        return _Keys(key, phi, value, self.real[:, rows].unfold(1, width, size))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None = None,
    past: StateTensors | None = None,
    return_state: bool = False,
) -> tuple[Tensor, StateTensors | None]:
    """Attention of query (B, H, n, D) to key (B, K, n, D), value (B, K, n, Dv): output (B, H, n, Dv), and the state."""
    query, key, value = (zero_pads(x, key_padding_mask) for x in (query, key, value))
    order, real = None, torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    if key_padding_mask is not None:
        order, real = real_first(key_padding_mask)
        query, key, value = (take_tokens(x, order) for x in (query, key, value))
    meets = CHUNK + kernel.window * (1 if is_causal else 2)
    is_short = past is None and not return_state and key.shape[2] <= min(meets, _SHORT)
    room = 0 if is_short else kernel.window if return_state else min(kernel.window, key.shape[2])
    state: Sums = dict(past or _nothing(key, value, kernel, room))  # type: ignore[arg-type]
    keys = _join(state, key, value, real, kernel)
    out = _output(query, keys, None if is_short else state["S"], kernel, is_causal)
    if order is not None:
        out = put_back(out.masked_fill(~real[:, None, :, None], 0), order)
    return out.to(query.dtype), _go_on(state, keys, real, key_padding_mask is not None) if return_state else None


def _nothing(key: Tensor, value: Tensor, kernel: Kernel, room: int) -> Sums:
    """The state of no tokens, with room for `room` keys.

    S (B, K, m, Dv + 1); key (B, K, w, D) and value (B, K, w, Dv), the newest last; count (B,), how many of them there are.
    """
    heads, width = key.shape[:2], value.shape[3]
    return {
        "S": upcast(value).new_zeros(*heads, kernel.features, width + 1),
        "key": key.new_zeros(*heads, room, key.shape[3]),
        "value": value.new_zeros(*heads, room, width),
        "count": torch.zeros(key.shape[0], dtype=torch.int64, device=key.device),
    }


def _join(state: Sums, key: Tensor, value: Tensor, real: Tensor, kernel: Kernel) -> _Keys:
    room = state["key"].shape[2]
    kept = torch.arange(room, device=key.device) >= room - state["count"][:, None]
    real = torch.cat([kept, real], dim=1)
    key, value = (upcast(torch.cat(pair, dim=2)) for pair in ((state["key"], key), (state["value"], value)))
    ones = value.new_ones(*value.shape[:3], 1)
    return _Keys(key, kernel.key(key) * real[:, None, :, None], torch.cat([value, ones], dim=-1), real)


def _output(query: Tensor, keys: _Keys, S: Tensor | None, kernel: Kernel, is_causal: bool) -> Tensor:
    """(B, H, n, Dv), for queries that stand at the last n keys; S are the sums of what lies before all keys.

    Without S the queries have all keys in one chunk.
    """
    length = query.shape[2]
    if not length:
        return query[..., :1].expand(*query.shape[:3], keys.value.shape[-1] - 1)
    size = length if S is None else min(CHUNK, length)
    chunks, front = -(-length // size), keys.key.shape[2] - length
    reach = front if is_causal else 2 * front
    query = F.pad(upcast(query), (0, 0, 0, chunks * size - length))
    keys = keys.padded(chunks * size + reach)
    beyond = None if S is None else _beyond(keys, S, chunks, size, reach, is_causal)

    at_once, recorded = chunks, (query, keys.key, keys.phi, keys.value, kernel.log_mix, *([] if S is None else [S]))
    if not needs_gradient(*recorded) and not torch.compiler.is_compiling():
        at_once = max(_PIECE // max(query.shape[0] * query.shape[1] * size * (size + reach), 1), 1)
    apart = torch.arange(size, device=query.device)[:, None] + front - torch.arange(size + reach, device=query.device)  # i - j
    outs = []
    for first in range(0, chunks, at_once):
        count = min(at_once, chunks - first)
        part = query[:, :, first * size : (first + count) * size]
        met = keys.met_by(first, count, size, size + reach)
        outs.append(_meet(part, met, None if beyond is None else beyond[:, :, first : first + count], apart, kernel, is_causal))
    return torch.cat(outs, dim=2)[:, :, :length]


def _beyond(keys: _Keys, S: Tensor, chunks: int, size: int, reach: int, is_causal: bool) -> Tensor:
    """(B, K, c, m, Dv + 1), the sums of keys that lie beyond those that a chunk meets."""
    before, _ = scan(S, keys.sums(0, chunks, size), None)
    if is_causal:
        return before
    after, _ = scan(torch.zeros_like(S), keys.sums(reach, chunks, size).flip(2), None)
    return before + after.flip(2)


def _meet(query: Tensor, keys: _Keys, beyond: Tensor | None, apart: Tensor, kernel: Kernel, is_causal: bool) -> Tensor:
    """Chunks of queries (B, H, c C, D), the keys that they meet, `apart` (C, W) their i - j, and the sums of those beyond."""
    size, shape = apart.shape[0], keys.key.shape[1:3]  # (K, c)

    def by_chunk(x: Tensor) -> Tensor:
        return x.unflatten(2, (shape[1], -1)).unflatten(1, (shape[0], -1)).transpose(2, 3)  # (B, K, c, G, C, ...)

    def times(x: Tensor, y: Tensor) -> Tensor:
        return (x.flatten(3, 4) @ y).unflatten(3, x.shape[3:5])

    near = (apart.abs() <= kernel.window) & keys.real[:, None, :, None, None]  # (B, 1, c, 1, C, W)
    far = apart.abs() > kernel.window
    phi, value = keys.phi, keys.value.contiguous()
    if is_causal:
        near, far = near & (apart >= 0), far & (apart > 0)
        phi, far = phi[..., :size, :], far[:, :size]  # further than the window before them lie none but the first C keys

    fq = by_chunk(kernel.query(query))
    pairs = times(fq, phi.contiguous().mT).masked_fill(~far, 0)
    distant = times(pairs, value[..., : phi.shape[3], :])  # (B, K, c, G, C, Dv + 1)
    if beyond is not None:
        distant = distant + times(fq, beyond)
    scores = times(by_chunk(query * kernel.scale), keys.key.contiguous().mT).masked_fill(~near, -math.inf)

    total = distant.detach()[..., -1:]
    is_there = total >= torch.finfo(total.dtype).tiny
    log_mix = kernel.log_mix.to(total.dtype).reshape(shape[0], 1, -1, 1, 1)  # (K, 1, G, 1, 1)
    top = (log_mix.detach() + total.log()).masked_fill(~is_there, -math.inf).maximum(scores.detach().amax(-1, keepdim=True))
    top = top.masked_fill(top == -math.inf, 0)
    factor = (log_mix - top).masked_fill(~is_there, -math.inf).exp()

    out = times(scores.sub_(top).exp_(), value).addcmul(distant, factor)
    out, divisor = out[..., :-1], out[..., -1:]
    out = out / divisor.masked_fill(divisor == 0, 1)
    return out.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B, H, c C, Dv)


def _go_on(state: Sums, keys: _Keys, real: Tensor, has_pads: bool) -> StateTensors:
    """What is left for later tokens: the last keys, and the sums of those that have now gone out of the window."""
    room, length = state["key"].shape[2], real.shape[1]
    count = real.sum(1)
    leaving = torch.arange(length, device=count.device) < count[:, None]
    phi = keys.phi[:, :, :length] * leaving[:, None, :, None]
    index = count[:, None] + torch.arange(room, device=count.device)
    kept = (x[:, :, length:].clone() if not has_pads else take_tokens(x, index) for x in (keys.key, keys.value[..., :-1]))
    key, value = (x.to(state[name].dtype) for name, x in zip(("key", "value"), kept, strict=True))
    return {
        "S": state["S"] + phi.mT @ keys.value[:, :, :length],
        "key": key,
        "value": value,
        "count": (state["count"] + count).clamp(max=room),
    }
