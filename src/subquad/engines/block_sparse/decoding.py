"""Decoding with the block-sparse engine: a state keeps the keys and values that later queries may see.

New tokens are appended to the state a few at a time, and attend, under a mask, to those of its keys that the layout lets them
see. For a single token a compiled kernel does both (`prepare_step`).

B batch, H query heads, K key-value heads, n tokens, S keys in a state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines import dense, token_buffer
from subquad.engines.block_sparse.layout import Layout
from subquad.engines.block_sparse.segments import Segments
from subquad.engines.call import Call
from subquad.engines.state_spec import StateSpec
from subquad.engines.step import StateView, Step
from subquad.engines.token_buffer import append_row, append_rows, drop_rows, is_full, steps
from subquad.ops.precision import compute_dtype, needs_gradient
from subquad.ops.rows import Pattern, RowRule, RowsStep
from subquad.ops.sparse.key_sets import BlockEnds, Blocks, KeySet, Window
from subquad.ops.sparse.pattern import Heads
from subquad.ops.sparse.random_blocks import RandomBlocks
from subquad.ops.sparse.segment_means import SegmentMeans
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

    state = drop_rows(state, ("number", "key", "value"), keep, _max_kept(layout, heads // kv_heads, seen))
    if layout.segments is None:
        return state
    return drop_rows(state, Segments.STATE_NAMES, lambda number: number >= 0, seen // layout.segments.size)


def _max_kept(layout: Layout, group: int, seen: int) -> int:
    """How many keys later queries can see at most, after `seen` tokens; `group` query heads share a key-value head."""
    return min(layout.first_global + sum(key_set.max_seen_later(seen, group) for key_set in layout.key_sets), seen)


def prepare_step(call: Call, layout_at: Callable[[int], Layout], period: int | None) -> Step | None:
    """A step of the compiled kernel, if it has the sets of keys of this layout.

    `layout_at` is the layout for a token after so many. It changes after every `period` tokens; None: never.
    """
    layout = layout_at(call.seen)
    is_known = all(_row_rule(key_set, None) is not None or isinstance(key_set, SegmentMeans) for key_set in layout.key_sets)
    if not is_known or call.query.dtype != compute_dtype(call.query):
        return None
    return _SparseStep(call, layout_at, period)


class _SparseStep(Step):
    def __init__(self, call: Call, layout_at: Callable[[int], Layout], period: int | None) -> None:
        self._token = call.query, call.key, call.value
        self._scale = call.softmax_scale
        self._heads, self._group = call.query.shape[1], call.query.shape[1] // call.key.shape[1]
        self._layout_at, self._period = layout_at, period
        self._latest: tuple[object, Layout, RowsStep, Tensor | None] | None = None  # in one tuple: threads may replace it

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, past: StateView, seen: int, *, may_overwrite: bool
    ) -> tuple[Tensor, StateTensors, bool]:
        held = past["count"]
        assert isinstance(held, Tensor)
        count = held if may_overwrite else held.clone(memory_format=torch.contiguous_format)
        layout, run, selected = self._prepared(seen, count)
        segments = (
            {} if layout.segments is None else {name: _adjacent(rows(past[name])) for name in layout.segments.STATE_NAMES}
        )
        starts = count.clone() if layout.segments is not None and _completes(layout.segments.size, count) else None
        grown = append_row(past, ("key", "value", "number"))
        length, buffers = grown["key"].length, {name: x.buffer for name, x in grown.items()}
        out = run(query, key, value, length, buffers, segments, count, count, selected=selected)
        state: StateTensors = {**past, **grown, "count": count}
        if starts is not None and layout.segments is not None:
            state = layout.segments.append_complete(state, starts, 1)
        if starts is not None or is_full(length, _max_kept(layout, self._group, seen + 1)):
            state = _drop_unseen(state, layout, self._heads, seen + 1)
        return out, state, True

    def _prepared(self, seen: int, count: Tensor) -> tuple[Layout, RowsStep, Tensor | None]:
        """The layout, the kernel, and the selected blocks (B, H, r) if there are any, for tokens at positions `count` (B,)."""
        period, latest = self._period, self._latest
        now = None if period is None else (seen // period, *(position // period for position in count.tolist()))
        if latest is None or latest[0] != now:
            layout = self._layout_at(seen)
            groups = [(heads, key_set) for heads, key_sets in layout.head_groups for key_set in key_sets]
            rules = [rule for heads, key_set in groups if (rule := _row_rule(key_set, heads)) is not None]
            size = 0 if layout.segments is None else layout.segments.size
            pattern = Pattern(rules, layout.first_global, size, layout.extra)
            latest = now, layout, RowsStep(*self._token, self._scale, pattern), self._selected(layout, count)
            self._latest = latest
        return latest[1:]

    def _selected(self, layout: Layout, count: Tensor) -> Tensor | None:
        found = next((key_set for key_set in layout.key_sets if isinstance(key_set, RandomBlocks)), None)
        if found is None:
            return None
        assert found.select is not None
        heads = torch.arange(self._heads, device=count.device)[None]
        return found.select(count[:, None] // found.size, heads).contiguous()


def _row_rule(key_set: KeySet, heads: Heads) -> RowRule | None:
    """What the kernel calls this set of keys; None if it does not have it."""
    match key_set:
        case Window():
            return RowRule(
                "window", key_set.dilation, -1 if key_set.before is None else key_set.before, key_set.without_self, heads
            )
        case Blocks():
            return RowRule("blocks", key_set.size, key_set.before, -1 if key_set.ends is None else key_set.ends, heads)
        case BlockEnds():
            return RowRule("block_ends", key_set.size, 0, key_set.count, heads)
        case RandomBlocks():
            return RowRule("selected", key_set.size, heads=heads)
    return None


def _completes(size: int, count: Tensor) -> bool:
    """Whether the token at position `count` (B,) is the last of its segment, in any row."""
    return any((position + 1) % size == 0 for position in count.tolist())


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
