"""Decoding with the block-sparse engine: a state keeps the keys and values that later queries may see.

New tokens are appended to the state a few at a time, and attend, under a mask, to those of its keys that the layout lets them
see.

B batch, H query heads, K key-value heads, n tokens, S keys in a state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines import dense, token_buffer
from subquad.engines.block_sparse.layout import Layout
from subquad.engines.block_sparse.segments import Segments
from subquad.engines.call import Call
from subquad.engines.state_spec import StateSpec
from subquad.engines.token_buffer import append_rows, drop_rows, steps
from subquad.ops.precision import needs_gradient
from subquad.state import StateTensors, rows


def attend(call: Call, layout: Layout) -> tuple[Tensor, StateTensors]:
    """Attention of tokens that continue the call's state, and the new state."""
    state, seen = call.past, call.seen
    assert state is not None
    outs = [call.query[:, :, :0, :1].expand(-1, -1, -1, call.value.shape[-1])]
    for _, step in steps(call):
        state, position = _append_tokens(state, step, layout)
        outs.append(_attend_to_state(step, state, position, layout))
        seen += step.query.shape[2]
        state = _drop_unseen(state, layout, call.query.shape[1], seen)
    return torch.cat(outs, dim=2), state


def state_spec(call: Call, layout: Layout) -> StateSpec:
    """The tensors of a state after `call.seen` tokens."""
    spec = token_buffer.state_spec(call)
    return spec if layout.segments is None else {**spec, **layout.segments.state_spec(call)}


def initial_state(call: Call, layout: Layout) -> StateTensors:
    """The state after a whole sequence."""
    start = torch.zeros(call.key.shape[0], dtype=torch.int64, device=call.key.device)
    state, _ = _append_tokens({"count": start}, call, layout)
    return _drop_unseen(state, layout, call.query.shape[1], call.key.shape[2])


def _append_tokens(state: StateTensors, call: Call, layout: Layout) -> tuple[StateTensors, Tensor]:
    """The state with the keys and values of the call, and the positions (B, n) of its queries, -1 for pads."""
    key, real, start = call.key, call.key_padding_mask, state["count"]
    assert isinstance(start, Tensor)
    if real is None:
        real = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    position = torch.where(real, start[:, None] + real.cumsum(1) - 1, -1)
    number = position[:, None, :, None].expand(-1, key.shape[1], -1, -1)
    recorded = needs_gradient(call.query, key, call.value)
    state = append_rows(state, {"key": key, "value": call.value, "number": number}, recorded=recorded)
    state["count"] = start + real.sum(1)
    if layout.segments is not None:
        state = layout.segments.append_complete(state, start, key.shape[2])
    return state, position


def _attend_to_state(call: Call, state: StateTensors, position: Tensor, layout: Layout) -> Tensor:
    """Queries (B, H, n, D) at `position` (B, n) attend to the keys of the state that they see."""
    query, key, value, j = call.query, *(rows(state[name]) for name in ("key", "value", "number"))
    group = query.shape[1] // key.shape[1]
    heads = torch.arange(query.shape[1], device=query.device).reshape(1, -1, 1, 1)
    i = position[:, None, :, None]  # (B, 1, n, 1)
    j = j.squeeze(-1).repeat_interleave(group, dim=1).unsqueeze(2)  # (B, H, 1, S)
    visible = (j < layout.first_global) | (i < layout.first_global)
    for members, key_sets in layout.head_groups:
        is_member = heads >= 0 if members is None else torch.isin(heads, torch.tensor(members, device=heads.device))
        for key_set in key_sets:
            visible = visible | (is_member & key_set.sees(i, j, heads))
    visible = visible & (j >= 0) & (j <= i)
    if layout.extra is not None:
        extra = [x.to(key.dtype).expand(key.shape[0], -1, -1, -1) for x in layout.extra]
        key, value = torch.cat([extra[0], key], dim=2), torch.cat([extra[1], value], dim=2)
        visible = F.pad(visible, (extra[0].shape[2], 0), value=True)
    if layout.segments is not None:
        mean_key, mean_value, sees_mean = layout.segments.complete(state, i)
        key = torch.cat([mean_key, key.to(mean_key.dtype)], dim=2)
        value = torch.cat([mean_value, value.to(mean_key.dtype)], dim=2)
        sees_mean = sees_mean.repeat_interleave(group, dim=1)
        visible = torch.cat([sees_mean, visible.expand(*sees_mean.shape[:3], -1)], dim=-1)
    out = dense.attend_masked(query.to(key.dtype), key, value, visible, call.softmax_scale).to(query.dtype)
    return out.masked_fill(i < 0, 0)


def _drop_unseen(state: StateTensors, layout: Layout, heads: int, seen: int) -> StateTensors:
    """The state without keys that no later query can see, after `seen` tokens."""
    count, kv_heads = state["count"], rows(state["key"]).shape[1]
    assert isinstance(count, Tensor)
    now = count.reshape(-1, 1, 1, 1)
    members = torch.arange(heads, device=count.device).reshape(kv_heads, -1, 1)  # (K, G, 1)
    key_sets = layout.key_sets

    def keep(position: Tensor) -> Tensor:
        j = position.unsqueeze(2)  # (B, K, 1, S)
        kept = j < layout.first_global
        for key_set in key_sets:
            kept = kept | key_set.seen_later(j, now, members)
        return (kept & (j >= 0)).any(2)

    max_kept = layout.first_global + sum(key_set.max_seen_later(seen, heads // kv_heads) for key_set in key_sets)
    state = drop_rows(state, ("number", "key", "value"), keep, min(max_kept, seen))
    if layout.segments is None:
        return state
    return drop_rows(state, Segments.STATE_NAMES, lambda number: number >= 0, seen // layout.segments.size)
