"""The block-sparse engine: softmax over a chosen set of keys.

A *layout* says, for each group of heads, which keys a query sees: the disjoint union of a few sets (see `key_sets`), and of
global tokens, which all see and which see all. Whole sequences run as tiles; tokens that go on from a state meet, under a mask,
the keys that it has kept.

B batch, H query heads, K key-value heads, n tokens, D channels, Dv value channels, g global tokens, S keys in a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines import dense
from subquad.engines import token_buffer as store
from subquad.engines.block_sparse import softmax as tiles
from subquad.engines.block_sparse.key_sets import KeySet, Tokens, seen_by_all
from subquad.engines.block_sparse.segments import Segments
from subquad.masks import put_back, real_first, take_tokens, zero_pads
from subquad.ops.precision import needs_gradient
from subquad.state import StateTensors

Globals = tuple[Tensor, Tensor]  # positions (B or 1, g), and which of them are there (B or 1, g)
Heads = tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Who sees whom. Positions count real tokens only; the queries of pads give 0.

    Args:
        groups: for each group of query heads (None: all) the sets of keys that it sees.
        is_causal: a query sees no key after it.
        globals: the global tokens of a whole sequence, by position.
        chosen: (B, n) bool, the global tokens of a whole sequence as they come, instead.
        first: how many of the first real tokens are global: all that decoding knows of global tokens.
        extra: keys (K, m, D) and values (K, m, Dv) that every query sees besides.
        rows: queries (B, H, n, D), keys (B, K, n, D) and values (B, K, n, Dv) for the rows of global tokens; None: the others'.
        segments: means of keys and values that are seen besides, which decoding has to keep; one of the sets.
    """

    groups: tuple[tuple[Heads, tuple[KeySet, ...]], ...]
    is_causal: bool
    globals: Globals | None = None
    chosen: Tensor | None = None
    first: int = 0
    extra: tuple[Tensor, Tensor] | None = None
    rows: tuple[Tensor, ...] | None = None
    segments: Segments | None = None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    key_padding_mask: Tensor | None,
    scale: float | None,
    seen: int = 0,
    past: StateTensors | None = None,
    return_state: bool = False,
) -> tuple[Tensor, StateTensors | None]:
    """Attention of query (B, H, n, D) to key (B, K, n, D), value (B, K, n, Dv); `seen` tokens went before, in `past`."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = zero_pads(key, key_padding_mask), zero_pads(value, key_padding_mask)
    if past is not None:
        return _go_on(query, key, value, layout, key_padding_mask, scale, seen, past)
    out = _whole(query, key, value, layout, key_padding_mask, scale)
    if not return_state:
        return out, None
    start = torch.zeros(key.shape[0], dtype=torch.int64, device=key.device)
    state, _ = _remember({"count": start}, query, key, value, layout, key_padding_mask)
    return out, _forget(state, layout, query.shape[1], key.shape[2])


def _whole(query: Tensor, key: Tensor, value: Tensor, layout: Layout, mask: Tensor | None, scale: float) -> Tensor:
    if not query.numel():
        return query[..., :1].expand(*query.shape[:3], value.shape[-1])
    order = None
    if mask is not None:
        order, mask = real_first(mask)
        query, key, value = (take_tokens(x, order) for x in (query, key, value))
        layout = _reordered(layout, order, mask)
    if layout.chosen is not None:
        layout = replace(layout, globals=_positions(layout.chosen))
    outs = [_group(*_select(query, key, value, heads), layout, sets, mask, scale) for heads, sets in layout.groups]
    out = outs[0] if len(outs) == 1 else _unselect(outs, layout)
    if layout.globals is not None:
        out = _write_rows(out, query, key, value, layout, mask, scale)
    if order is not None and mask is not None:
        out = put_back(out.masked_fill(~mask[:, None, :, None], 0), order)
    return out.to(query.dtype)


def _group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    sets: Sequence[KeySet],
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Heads that see the same sets: (B, H, n, Dv)."""
    allowed = mask
    if layout.globals is not None:  # a global token is seen as such, and not again in a set
        allowed = ~_is_global(layout.globals, query.shape[0], query.shape[2])
        allowed = allowed if mask is None else allowed & mask
    x = Tokens.of(query, key, value, allowed)
    parts = [part for s in sets for part in s.parts(x)]
    if layout.globals is not None:
        parts.append(seen_by_all(x, *layout.globals, layout.is_causal))
    if layout.extra is not None:
        extra = [t.to(x.key.dtype).expand(key.shape[0], -1, -1, -1) for t in layout.extra]
        parts.append(x.meets(extra[0], extra[1]))
    out, _ = tiles.attend(parts, query.shape[2], scale)
    return out.unflatten(0, query.shape[:2])


def _write_rows(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, layout: Layout, mask: Tensor | None, scale: float
) -> Tensor:
    """The rows of global tokens see all tokens; where the layout is causal, all before them."""
    assert layout.globals is not None
    index, there = (t.expand(query.shape[0], -1) for t in layout.globals)
    query, key, value = (query, key, value) if layout.rows is None else layout.rows
    length = query.shape[2]
    visible = there.unsqueeze(-1).expand(-1, -1, length)  # (B, g, n)
    if mask is not None:
        visible = visible & mask.unsqueeze(1)
    if layout.is_causal:
        visible = visible & (torch.arange(length, device=query.device) <= index.unsqueeze(-1))
    rows = dense.attend_masked(take_tokens(query, index), key, value, visible.unsqueeze(1), scale)
    target = torch.where(there, index, length)[:, None, :, None].expand(-1, out.shape[1], -1, out.shape[-1])
    return F.pad(out, (0, 0, 0, 1)).scatter(2, target, rows.to(out.dtype))[:, :, :length]


def _go_on(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    mask: Tensor | None,
    scale: float,
    seen: int,
    state: StateTensors,
) -> tuple[Tensor, StateTensors]:
    """A few tokens at a time: they join the keys of the state, and meet those that they see."""
    outs = [query[:, :, :0, :1].expand(-1, -1, -1, value.shape[-1])]
    for q, k, v, real in _steps(query, key, value, mask):
        state, position = _remember(state, q, k, v, layout, real)
        outs.append(_step(q, state, position, layout, scale))
        seen += q.shape[2]
        state = _forget(state, layout, query.shape[1], seen)
    return torch.cat(outs, dim=2), state


def _steps(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Iterator[Any]:
    parts = [x.split(store.STEP, dim=2) if x.shape[2] else () for x in (query, key, value)]
    masks = [None] * len(parts[0]) if mask is None else mask.split(store.STEP, dim=1)
    return zip(*parts, masks, strict=False)


def _step(query: Tensor, state: StateTensors, position: Tensor, layout: Layout, scale: float) -> Tensor:
    """Queries (B, H, n, D) at `position` (B, n) meet the keys that they see."""
    key, value, j = (store.rows(state[name]) for name in ("key", "value", "number"))
    heads = torch.arange(query.shape[1], device=query.device).reshape(1, -1, 1, 1)
    i = position[:, None, :, None]  # (B, 1, n, 1)
    j = j.squeeze(-1).repeat_interleave(query.shape[1] // key.shape[1], dim=1).unsqueeze(2)  # (B, H, 1, S)
    visible = (j < layout.first) | (i < layout.first)
    for members, sets in layout.groups:
        ours = heads >= 0 if members is None else torch.isin(heads, torch.tensor(members, device=heads.device))
        for s in sets:
            visible = visible | (ours & s.sees(i, j, heads))
    visible = visible & (j >= 0) & (j <= i)
    if layout.extra is not None:
        extra = [x.to(key.dtype).expand(key.shape[0], -1, -1, -1) for x in layout.extra]
        key, value = torch.cat([extra[0], key], dim=2), torch.cat([extra[1], value], dim=2)
        visible = F.pad(visible, (extra[0].shape[2], 0), value=True)
    if layout.segments is not None:
        means, their_values, shown = layout.segments.shown(state, i)
        key, value = torch.cat([means, key.to(means.dtype)], dim=2), torch.cat([their_values, value.to(means.dtype)], dim=2)
        shown = shown.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        visible = torch.cat([shown, visible.expand(*shown.shape[:3], -1)], dim=-1)
    out = dense.attend_masked(query.to(key.dtype), key, value, visible, scale).to(query.dtype)
    return out.masked_fill(i < 0, 0)


def _remember(
    state: StateTensors, query: Tensor, key: Tensor, value: Tensor, layout: Layout, mask: Tensor | None
) -> tuple[StateTensors, Tensor]:
    """The state with these keys, and the positions (B, n) of their queries, -1 for pads."""
    start, length = state["count"], key.shape[2]
    assert isinstance(start, Tensor)
    real = torch.ones(key.shape[0], length, dtype=torch.bool, device=key.device) if mask is None else mask
    position = torch.where(real, start[:, None] + real.cumsum(1) - 1, -1)
    rows = {"key": key, "value": value, "number": position[:, None, :, None].expand(-1, key.shape[1], -1, -1)}
    recorded = needs_gradient(query, key, value)
    state = {**store.append(state, rows, recorded), "count": start + real.sum(1)}
    return state if layout.segments is None else layout.segments.finish(state, start, length), position


def _forget(state: StateTensors, layout: Layout, heads: int, seen: int) -> StateTensors:
    """What later queries can still see."""
    count, kv_heads = state["count"], store.rows(state["key"]).shape[1]
    assert isinstance(count, Tensor)
    now = count.reshape(-1, 1, 1, 1)
    members = torch.arange(heads, device=count.device).reshape(kv_heads, -1, 1)  # (K, G, 1)
    sets = [s for _, group in layout.groups for s in group]

    def keep(position: Tensor) -> Tensor:
        j = position.unsqueeze(2)  # (B, K, 1, S)
        kept = j < layout.first
        for s in sets:
            kept = kept | s.keeps(j, now, members)
        return (kept & (j >= 0)).any(2)

    room = layout.first + sum(s.room(seen, heads // kv_heads) for s in sets)
    state = store.forget(state, ("number", "key", "value"), keep, min(room, seen))
    if layout.segments is None:
        return state
    return store.forget(state, Segments.ROWS, lambda number: number >= 0, seen // layout.segments.size)


def _reordered(layout: Layout, order: Tensor, mask: Tensor) -> Layout:
    """What the layout holds by token, in another order; pads are not global."""
    rows = None if layout.rows is None else tuple(take_tokens(x, order) for x in layout.rows)
    chosen = None if layout.chosen is None else layout.chosen.gather(1, order) & mask
    return replace(layout, rows=rows, chosen=chosen)


def _positions(chosen: Tensor) -> Globals | None:
    most = int(chosen.sum(1).max()) if chosen.numel() else 0
    index, there = (t[:, :most] for t in real_first(chosen))
    return (index, there) if most else None


def _is_global(tokens: Globals, batch: int, length: int) -> Tensor:
    """(B, n)."""
    index, there = tokens
    room = torch.zeros(batch, length + 1, dtype=torch.bool, device=index.device)
    return room.scatter(1, torch.where(there, index, length).expand(batch, -1), True)[:, :length]


def _select(query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Some query heads, and the key-value head of each."""
    if heads is None:
        return query, key, value
    kv_heads = [head * key.shape[1] // query.shape[1] for head in heads]
    return query[:, list(heads)], key[:, kv_heads], value[:, kv_heads]


def _unselect(outs: Sequence[Tensor], layout: Layout) -> Tensor:
    order = [head for heads, _ in layout.groups for head in heads or ()]
    return torch.cat(list(outs), dim=1)[:, [order.index(head) for head in range(len(order))]]
