"""The kernelized engine: attention as sums over keys, never over pairs.

    o_i = phi(q_i) S_i / (phi(q_i) . z_i),    S_i = sum_j phi(k_j) v_j^T,    z_i = sum_j phi(k_j)

over all keys j, or over j <= i when causal. Values carry a column of ones, so that z is the last column of S.

A map may give phi in two factors, `phi(k_j) = e^(b_j) f_j`: the sums are then kept relative to a running level of b, so that
nothing overflows and no early key vanishes behind a later one.

Causal sums go chunk by chunk. Inside a chunk, queries meet keys in a small masked product; what lies before the chunk
enters through the sums. Cost: O(N (C + m) Dv) time for chunks of C, and one (m, Dv) state a chunk.

B batch, H query heads, K key-value heads, G = H / K queries a group, N queries, M keys, D channels, Dv value channels,
m features, c chunks of C tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from subquad.engines.chunk_weights import (
    CHUNK,
    Weights,
    equal,
    gated,
    levelled_by_channel,
    levelled_by_chunk,
    levelled_by_key,
    lowest,
)
from subquad.masks import zero_pads
from subquad.ops import dispatch
from subquad.ops import kernelized as compiled
from subquad.ops.double_backward import recomputed_gradients
from subquad.ops.kernelized import Map
from subquad.ops.precision import needs_gradient, upcast
from subquad.state import StateTensors

Normalizer = Literal["sum", "signed", "mean", "none", "channel"]
Sums = dict[str, Tensor]
# S (B, K, m, Dv + 1), without normalizer or with "mean" (B, K, m, Dv); level (B, K, 1, 1 or m), the largest b so far;
# count (B, 1, 1, 1), the number of keys so far.

# Worked on at a time: so little that it stays in cache, so much that the operations outweigh their calls.
_PIECE = 2**18  # features,
_ROWS = 2**11  # but at least so many rows of them, that is tokens times heads


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernelized mechanism, as the engine sees it.

    Args:
        project: what is first done to queries and keys (B, K, n, D); None: nothing.
        query: a map of (B, K, n, D) to (B, K, n, m): phi up to a factor for each query, which cancels.
        key: a map of (B, K, n, D) to f and b, phi = e^b f. f is (B, K, n, m), and b None for 0 or (B, K, n, 1); or, with the
            normalizer "channel", f is None for 1, and b is (B, K, n, m).
        features: m.
        normalizer: "sum" divides by phi(q) . z; "signed" likewise, its magnitude held above `floor`, for maps with negative
            features; "mean" divides by the number of keys; "channel" divides every feature of the query by its own z;
            "none" divides by nothing.
        floor: see "signed".
        log_gate: (B, K, M), log g: `S <- g S + (1 - g) phi(k) v^T` at every token. Causal only.
        weights: what else all these read; into what `project` reads, gradients are taken.
        compiled: the same maps as the compiled loops know them, where they do; its `weight` projects.
    """

    project: Callable[[Tensor], Tensor] | None = None
    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], tuple[Tensor | None, Tensor | None]]
    features: int
    normalizer: Normalizer = "sum"
    floor: float = 0.0
    log_gate: Tensor | None = None
    weights: tuple[Tensor, ...] = ()
    compiled: Map | None = None

    @property
    def has_ones(self) -> bool:
        """Whether values carry a column of ones."""
        return self.normalizer in ("sum", "signed", "channel")

    def projected(self, x: Tensor) -> Tensor:
        return x if self.project is None else self.project(x)


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
    """Attention of query (B, H, N, D) to key (B, K, M, D), value (B, K, M, Dv): output (B, H, N, Dv), and the sums."""
    sums: Sums = dict(past or {})  # type: ignore[arg-type]
    run = _by_loops if _is_compiled(query, key, value, kernel, sums, return_state) else _by_pytorch
    out = run(query, key, value, kernel, is_causal, key_padding_mask, sums)
    return out.to(query.dtype), {**sums} if return_state else None


def _by_pytorch(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, is_causal: bool, key_padding_mask: Tensor | None, sums: Sums
) -> Tensor:
    """The output; `sums` take the keys in."""
    source = _Source(key, value, key_padding_mask, kernel.log_gate)
    walk = _causal if is_causal and query.shape[2] != 1 else _bidirectional  # a single query sees every key, its own included
    if _whole(query, key, value, kernel.log_gate, *kernel.weights):
        pieces = walk(query, source, kernel, sums, max(query.shape[2], key.shape[2], 1))
        return torch.cat(list(pieces), dim=2)
    rows = max(_PIECE // kernel.features, _ROWS)
    chunks = rows // max(query.shape[0] * query.shape[1] * CHUNK, 1)
    out, start = query.new_empty(*query.shape[:3], value.shape[-1]), 0
    for piece in walk(query, source, kernel, sums, max(chunks, 1) * CHUNK):
        out[:, :, start : (start := start + piece.shape[2])] = piece
    return out


def _is_compiled(query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, sums: Sums, return_state: bool) -> bool:
    """Whether the compiled loops do this: they have no gradients of states and of what the maps read."""
    if kernel.compiled is None or not dispatch.can_use_compiled(query, key, value, *kernel.weights, *sums.values()):
        return False
    has_state = return_state or bool(sums)
    learned = () if kernel.project is None else kernel.weights
    if kernel.project is None and needs_gradient(*kernel.weights):
        return False
    return not (has_state and needs_gradient(query, key, value, *learned, *sums.values()))


def _by_loops(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, is_causal: bool, key_padding_mask: Tensor | None, sums: Sums
) -> Tensor:
    """The output; `sums` take the keys in, where no graph is recorded."""
    if kernel.project is not None and needs_gradient(query, key, value, *kernel.weights):
        query, key, kernel = _project(query, zero_pads(key, key_padding_mask), kernel)
    if needs_gradient(query, key, value):
        return _Compiled.apply(query, key, value, key_padding_mask, kernel, is_causal)[0]  # type: ignore[no-untyped-call]
    out, after, _ = compiled.forward(
        query, key, value, key_padding_mask, **_loops(kernel, is_causal), past=sums, return_sums=True
    )
    sums |= after
    return out


def _project(query: Tensor, key: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor, Kernel]:
    """Queries and keys projected at once, which autograd records, and the kernel of what is left to do."""
    assert kernel.compiled is not None
    groups = upcast(query).unflatten(1, (key.shape[1], -1))  # (B, K, G, n, D)
    query = kernel.projected(groups.flatten(2, 3)).unflatten(2, groups.shape[2:4]).flatten(1, 2)
    left = replace(kernel, project=None, weights=(), compiled=replace(kernel.compiled, weight=None))
    return query, kernel.projected(upcast(key)), left


def _loops(kernel: Kernel, is_causal: bool) -> dict[str, Any]:
    return {
        "map": kernel.compiled,
        "features": kernel.features,
        "divisor": kernel.normalizer,
        "floor": kernel.floor,
        "is_causal": is_causal,
    }


class _Compiled(torch.autograd.Function):
    """The output, its divisors, and the sums. Queries, keys and values are kept besides; the rest is computed again."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernel: Kernel, is_causal: bool
    ) -> tuple[Tensor, ...]:
        out, sums, divisors = compiled.forward(
            query, key, value, mask, **_loops(kernel, is_causal), return_divisors=True, return_sums=not is_causal
        )
        assert divisors is not None
        return out, divisors, *sums.values()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.kernel, ctx.is_causal = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        query, key, value, mask, out, divisors, *sums = ctx.saved_tensors
        if not torch.is_grad_enabled():
            names = ("S", "count" if ctx.kernel.normalizer == "mean" else "level")
            before = dict(zip(names, sums, strict=False))
            loops = _loops(ctx.kernel, ctx.is_causal)
            grads = compiled.backward(grad, query, key, value, mask, out, divisors, before, **loops)
            return *(g.to(x.dtype) for g, x in zip(grads, (query, key, value), strict=True)), None, None, None
        run = partial(_by_pytorch, query, key, value, ctx.kernel, ctx.is_causal, mask, {})
        return *recomputed_gradients(run, (query, key, value), ctx.needs_input_grad[:3], grad), None, None, None


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

    f: Tensor | None  # (B, K, n, m); None: 1, where b has the channels
    b: Tensor | None  # (B, K, n, 1 or m); None: 0
    value: Tensor  # (B, K, n, Dv + 1), or (B, K, n, Dv) without ones
    log_gate: Tensor | None  # (B, K, n, 1)
    real: Tensor | None  # (B, 1, n, 1) bool; None: no pads

    def weights(self, chunk: int, level: Tensor | None, *, causal: bool) -> Weights:
        """In chunks of `chunk`; not causal, only what is left at the end of a chunk matters."""
        f, b, gate = (None if t is None else t.unflatten(2, (-1, chunk)) for t in (self.f, self.b, self.log_gate))
        if b is None:
            assert f is not None
            return equal(f) if gate is None else gated(f, gate)
        assert level is not None
        if not causal:
            return levelled_by_chunk(f, b, level)
        return levelled_by_channel(b, level) if f is None else levelled_by_key(f, b, level)

    def count(self) -> Tensor:
        """(B or 1, 1, n, 1): 1 for each real key."""
        return self.value.new_ones(1, 1, self.value.shape[2], 1) if self.real is None else self.real.to(self.value.dtype)


def _map_keys(source: _Source, kernel: Kernel) -> _Keys:
    f, b = kernel.key(kernel.projected(zero_pads(upcast(source.key), source.mask)))
    value = zero_pads(upcast(source.value), source.mask)
    if kernel.has_ones:
        value = torch.cat([value, value.new_ones(*value.shape[:-1], 1)], dim=-1)
    gate = source.log_gate.unsqueeze(-1) if source.log_gate is not None else None
    if f is not None and gate is not None:
        f = f * -gate.expm1()  # S <- g S + (1 - g) phi(k) v^T
    if source.mask is None:
        return _Keys(f, b, value, gate, None)
    real = source.mask[:, None, :, None]
    if b is not None:
        b = b.masked_fill(~real, lowest(b))  # below every real key; until one comes, sums of zero values
    elif f is not None:
        f = f * real
    gate = gate.masked_fill(~real, 0.0) if gate is not None else None
    return _Keys(f, b, value, gate, real)


def _bidirectional(query: Tensor, source: _Source, kernel: Kernel, sums: Sums, piece: int) -> Iterator[Tensor]:
    for part in source.split(_lengths(source.key.shape[2], piece)):
        _absorb(_map_keys(part, kernel), kernel, sums)
    S = sums["S"]
    if kernel.normalizer == "channel":
        S = S / _nonzero(S[..., -1:])
    for part in query.split(_lengths(query.shape[2], piece), dim=2):
        groups = upcast(part).unflatten(1, (source.key.shape[1], -1))  # (B, K, G, n, D)
        out = kernel.query(kernel.projected(groups.flatten(2, 3))) @ S  # (B, K, G n, Dv + 1)
        yield _normalize(out, sums.get("count"), kernel).unflatten(2, groups.shape[2:4]).flatten(1, 2)  # (B, H, n, Dv)


def _absorb(keys: _Keys, kernel: Kernel, sums: Sums) -> None:
    """Add a piece of keys to the sums, and raise their level where a key stands above it."""
    if not sums:
        sums |= _nothing(keys, kernel)
    if keys.value.shape[2] == 0:
        return
    weights = keys.weights(keys.value.shape[2], sums.get("level"), causal=False)
    if weights.level is not None:
        sums["level"] = weights.level
    _, sums["S"] = scan(sums["S"], weights.sums(keys.value.unsqueeze(2)), weights.decay)
    if "count" in sums:
        sums["count"] = sums["count"] + keys.count().sum(-2, keepdim=True)


def _causal(query: Tensor, source: _Source, kernel: Kernel, sums: Sums, piece: int) -> Iterator[Tensor]:
    lengths = _lengths(query.shape[2], piece)
    for part, keys in zip(query.split(lengths, dim=2), source.split(lengths), strict=True):
        yield _causal_piece(upcast(part), _map_keys(keys, kernel), kernel, sums)


def _causal_piece(query: Tensor, keys: _Keys, kernel: Kernel, sums: Sums) -> Tensor:
    """Queries (B, H, n, D) over the sums so far and the keys up to their own; the sums take the keys in."""
    if not sums:
        sums |= _nothing(keys, kernel)
    if query.shape[2] == 0:
        return query[..., :1].expand(*query.shape[:3], keys.value.shape[-1] - kernel.has_ones)
    weights = keys.weights(min(CHUNK, query.shape[2]), sums.get("level"), causal=True)
    value = keys.value.unflatten(2, (-1, weights.chunk))  # (B, K, c, C, Dv + 1)
    grouped = query.unflatten(2, (-1, weights.chunk)).unflatten(1, (value.shape[1], -1)).transpose(2, 3)  # (B, K, c, G, C, D)
    fq = kernel.query(kernel.projected(grouped.flatten(2, 4))).unflatten(2, grouped.shape[2:5])  # (B, K, c, G, C, m)

    S, sums["S"] = scan(sums["S"], weights.sums(value), weights.decay)  # (B, K, c, m, Dv + 1): as each chunk finds it
    if weights.level is not None:
        sums["level"] = weights.level
    if kernel.normalizer == "channel":
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
    return _normalize(out, count, kernel).transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B, H, n, Dv)


def scan(total: Tensor, added: Tensor, decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """`total <- decay total + added`, chunk by chunk: the totals before each chunk (B, K, c, m, Dv + 1), and after the last."""
    totals = []
    decays = [None] * added.shape[2] if decay is None else decay.mT.unbind(2)
    for new, factor in zip(added.unbind(2), decays, strict=True):
        totals.append(total)
        total = total + new if factor is None else torch.addcmul(new, total, factor)
    return torch.stack(totals, dim=2), total


def _nothing(keys: _Keys, kernel: Kernel) -> Sums:
    """The sums over no keys."""
    batch, kv_heads, _, width = keys.value.shape
    sums = {"S": keys.value.new_zeros(batch, kv_heads, kernel.features, width)}
    if kernel.normalizer == "mean":
        sums["count"] = keys.value.new_zeros(batch, 1, 1, 1)
    if keys.b is not None:
        sums["level"] = keys.b.new_full((batch, kv_heads, 1, keys.b.shape[-1]), lowest(keys.b))
    return sums


def _normalize(out: Tensor, count: Tensor | None, kernel: Kernel) -> Tensor:
    """out (..., Dv + 1) -> (..., Dv), 0 where there was nothing to attend to."""
    if count is not None:
        return out / _nonzero(count)
    if not kernel.has_ones:
        return out
    out, total = out[..., :-1], out[..., -1:]
    if kernel.normalizer == "channel":
        return out
    if kernel.normalizer == "signed":
        total = torch.where(total.abs() < kernel.floor, torch.full_like(total, kernel.floor).copysign(total), total)
    return out / _nonzero(total)


def _nonzero(total: Tensor) -> Tensor:
    """Where nothing was summed, a divisor that leaves its zeros as they are."""
    return total.masked_fill(total == 0, 1.0)


def _whole(*tensors: Tensor | None) -> bool:
    """Whether to take the sequence in one piece: a recorded graph keeps every intermediate anyway."""
    return needs_gradient(*tensors) or torch.compiler.is_compiling()


def _lengths(length: int, piece: int) -> list[int]:
    """Pieces of whole chunks, then what is left over."""
    tail = length % CHUNK
    lengths = [piece] * ((length - tail) // piece)
    rest = (length - tail) % piece
    return [n for n in (*lengths, rest, tail) if n] or [0]
