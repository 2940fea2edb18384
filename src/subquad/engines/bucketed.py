"""The bucketed engine: a query sees keys of its own bucket that are near it when all keys are sorted.

The operator of `subquad.ops.bucketed` computes a whole sequence; its `rule` says which keys a query sees.

B batch, H query heads, K key-value heads, n tokens, Dv value channels, R rounds, C tokens per chunk, S keys in a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from subquad.engines import dense, token_buffer
from subquad.engines.call import Call
from subquad.engines.state_spec import StateSpec, TensorSpec
from subquad.engines.step import StateView, Step
from subquad.engines.token_buffer import append_row, append_rows, drop_rows, is_full, steps
from subquad.masks import zero_pads
from subquad.ops import bucketed
from subquad.ops.bucketed import Rule
from subquad.ops.precision import compute_dtype, needs_gradient
from subquad.ops.rows import Pattern, RowsStep
from subquad.state import StateTensors, rows

__all__ = ["Rule", "attend", "state_spec"]


def attend(call: Call, query_bucket: Tensor, key_bucket: Tensor, rule: Rule) -> tuple[Tensor, StateTensors | None]:
    """The output (B, H, n, Dv), and the tensors of the new state if the call asks for them.

    Queries are in the buckets `query_bucket` (B, H, R, n), keys in `key_bucket` (B, K, R, n).
    """
    if call.state is not None:
        return _decode(_without_pads(call), query_bucket, key_bucket, rule)
    out = _attend_sequence(call, query_bucket, key_bucket, rule)
    if not call.return_state:
        return out, None
    start = torch.zeros(call.key.shape[0], dtype=torch.int64, device=call.key.device)
    state = _append_tokens({"count": start}, _without_pads(call), key_bucket)
    return out, _drop_unseen(state, rule, call.key.shape[2])


def _without_pads(call: Call) -> Call:
    """The call with pads set to 0: a state keeps them until they are dropped."""
    query, key, value = (zero_pads(x, call.key_padding_mask) for x in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value)


def state_spec(call: Call, rule: Rule) -> StateSpec:
    """The tensors of a state after `call.seen` tokens; its count includes pads."""
    spec = token_buffer.state_spec(call)
    return {
        **spec,
        "count": TensorSpec((), torch.int64, range=(call.seen, call.seen)),
        "bucket": TensorSpec((*spec["number"].shape[:2], rule.rounds), torch.int64, range=(0, rule.buckets - 1)),
    }


def _attend_sequence(call: Call, query_bucket: Tensor, key_bucket: Tensor, rule: Rule) -> Tensor:
    """A whole sequence: (B, H, n, Dv)."""
    mask, dtype = call.key_padding_mask, call.query.dtype
    if mask is not None:
        query_bucket, key_bucket = (t.masked_fill(~mask[:, None, None], rule.buckets) for t in (query_bucket, key_bucket))
    together = torch.promote_types(dtype, call.key.dtype)  # a mechanism may compute its keys in a higher precision
    query, key, value = (x.to(together) for x in (call.query, call.key, call.value))
    return bucketed.attend(query, key, value, query_bucket, key_bucket, rule, call.softmax_scale).to(dtype)


def _decode(call: Call, query_bucket: Tensor, key_bucket: Tensor, rule: Rule) -> tuple[Tensor, StateTensors]:
    """Attention of tokens that continue the call's state, and the new state."""
    state, seen, outs = call.past, call.seen, [call.query[:, :, :0, :1].expand(-1, -1, -1, call.value.shape[-1])]
    assert state is not None
    for piece, step in steps(call):
        state = _append_tokens(state, step, key_bucket[..., piece])
        out = _attend_to_state(step, query_bucket[..., piece], state, rule)
        outs.append(zero_pads(out, step.key_padding_mask))
        seen += out.shape[2]
        state = _drop_unseen(state, rule, seen)
    return torch.cat(outs, dim=2), state


def _append_tokens(state: StateTensors, call: Call, bucket: Tensor) -> StateTensors:
    """The state with the keys and values of the call, which are in `bucket` (B, K, R, n)."""
    key, count = call.key, state["count"]
    assert isinstance(count, Tensor)
    position = count[:, None] + torch.arange(key.shape[2], device=key.device)
    if call.key_padding_mask is not None:
        position = position.masked_fill(~call.key_padding_mask, -1)
    new = {
        "key": key,
        "value": call.value,
        "number": position[:, None, :, None].expand(-1, key.shape[1], -1, -1),
        "bucket": bucket.mT,  # (B, K, n, R)
    }
    recorded = needs_gradient(call.query, key, call.value)
    return {**append_rows(state, new, recorded=recorded), "count": count + key.shape[2]}


def _attend_to_state(call: Call, query_bucket: Tensor, state: StateTensors, rule: Rule) -> Tensor:
    """The newest queries (B, H, n, D) attend to the keys of the state that they see."""
    query, key, value, position, bucket = call.query, *(rows(state[name]) for name in ("key", "value", "number", "bucket"))
    dtype = torch.promote_types(query.dtype, key.dtype)
    group, length, count = query.shape[1] // key.shape[1], query.shape[2], state["count"]
    assert isinstance(count, Tensor)
    i = (count[:, None] - length + torch.arange(length, device=query.device))[:, None, :, None]  # (B, 1, n, 1)
    j = position.squeeze(-1).repeat_interleave(group, dim=1).unsqueeze(2)  # (B, H, 1, S)
    buckets = bucket.repeat_interleave(group, dim=1)  # (B, H, S, R)
    visible = torch.zeros(1, dtype=torch.bool, device=query.device)
    for now in range(rule.rounds):
        match = (query_bucket[:, :, now, :, None] == buckets[:, :, None, :, now]) & (j >= 0) & (j < i)  # (B, H, n, S)
        newer = match.flip(-1).cumsum(-1).flip(-1)  # matches from this key on
        visible = visible | (match & (newer <= rule.chunk))
    own = i == j
    visible = visible | (own & ~visible.any(-1, keepdim=True) if rule.shared else own)
    return dense.attend_masked(query.to(dtype), key, value.to(dtype), visible, call.softmax_scale).to(query.dtype)


def _drop_unseen(state: StateTensors, rule: Rule, seen: int) -> StateTensors:
    """The state with the last C keys of every bucket in every round, after `seen` tokens."""

    def keep(position: Tensor) -> Tensor:
        bucket = rows(state["bucket"]).mT.contiguous()  # (B, K, R, S)
        used = torch.where((position >= 0).unsqueeze(2), bucket, -1)
        ordered, order = used.sort(dim=-1, stable=True)
        newer = torch.searchsorted(ordered, ordered, right=True) - torch.arange(ordered.shape[-1], device=order.device)
        recent = torch.zeros_like(used, dtype=torch.bool).scatter(-1, order, newer <= rule.chunk)
        return recent.any(2) & (position >= 0)

    return drop_rows(state, _ROWS, keep, _max_kept(rule, seen))


_ROWS = ("number", "key", "value", "bucket")


def _max_kept(rule: Rule, seen: int) -> int:
    """How many keys later queries can see at most, after `seen` tokens."""
    return min(rule.rounds * rule.buckets * rule.chunk, seen)


Buckets = tuple[Tensor, Tensor, Tensor]


def prepare_step(call: Call, sort: Callable[[Tensor, Tensor], Buckets], rule: Rule) -> Step | None:
    """A step of the compiled kernel, for a call like this one, with the keys and the scale that scores are computed with.

    `sort` maps the queries and keys of a token to those keys, and to the buckets (B, H, R, 1) and (B, K, R, 1) of both.
    """
    if call.query.dtype != compute_dtype(call.query):
        return None
    return _BucketedStep(call, sort, rule)


class _BucketedStep(Step):
    def __init__(self, call: Call, sort: Callable[[Tensor, Tensor], Buckets], rule: Rule) -> None:
        pattern = Pattern(rounds=rule.rounds, chunk=rule.chunk, is_shared=rule.shared)
        self._run = RowsStep(call.query, call.key, call.value, call.softmax_scale, pattern)
        self._sort, self._rule = sort, rule

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, past: StateView, seen: int, *, may_overwrite: bool
    ) -> tuple[Tensor, StateTensors, bool]:
        held = past["count"]
        assert isinstance(held, Tensor)
        count = held if may_overwrite else held.clone(memory_format=torch.contiguous_format)
        key, *buckets = self._sort(query, key)
        query_bucket, key_bucket = (x.contiguous() for x in buckets)
        grown = append_row(past, _ROWS)
        buffers = {name: x.buffer for name, x in grown.items()}
        length = grown["key"].length
        out = self._run(query, key, value, length, buffers, {}, count, count, buckets=(query_bucket, key_bucket))
        state: StateTensors = {**past, **grown, "count": count}
        if is_full(length, _max_kept(self._rule, seen + 1)):
            state = _drop_unseen(state, self._rule, seen + 1)
        return out, state, True
