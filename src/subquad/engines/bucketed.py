"""The bucketed engine: a query sees keys of its own bucket that are near it when all keys are sorted.

In each round every query and every key is in a bucket. Keys are sorted by (bucket, position); the *rank* of a query is the
number of keys that are sorted before its own (bucket, position). It sees the keys of its bucket

    bidirectional   in the chunk of C sorted keys that contains its rank, and in the chunk before
    causal          among the C sorted keys before its rank: the last C earlier tokens of the bucket

and, over several rounds, the union of what it sees in each: a pair is masked in all rounds but the first that shows it. A query
also sees its own key; if queries and keys are the same vectors (`shared`), only if it sees no other. Pads are in no bucket.

B batch, H query heads, K key-value heads, n tokens, D channels, Dv value channels, R rounds, C tokens per chunk, c chunks, p
pairs of chunks, S keys in a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines import dense, token_buffer
from subquad.engines.block_sparse import softmax
from subquad.engines.block_sparse.key_sets import Blocks, Tokens
from subquad.engines.call import Call
from subquad.engines.state_spec import StateSpec, TensorSpec
from subquad.engines.step import StateView, Step
from subquad.engines.token_buffer import append_row, append_rows, drop_rows, is_full, steps
from subquad.masks import zero_pads
from subquad.ops import bucketed as compiled
from subquad.ops.bucketed import Rule
from subquad.ops.dispatch import can_use_compiled
from subquad.ops.precision import compute_dtype, needs_gradient, upcast
from subquad.ops.rows import Pattern, RowsStep
from subquad.ops.tiles import MASKED, Tile, TileGroup
from subquad.state import StateTensors, rows

__all__ = ["Rule", "attend", "state_spec"]


def attend(call: Call, query_bucket: Tensor, key_bucket: Tensor, rule: Rule) -> tuple[Tensor, StateTensors | None]:
    """The output (B, H, n, Dv), and the tensors of the new state if the call asks for them.

    Queries are in the buckets `query_bucket` (B, H, R, n), keys in `key_bucket` (B, K, R, n).
    """
    if call.key_padding_mask is not None:
        query, key, value = (zero_pads(x, call.key_padding_mask) for x in (call.query, call.key, call.value))
        call = replace(call, query=query, key=key, value=value)
    if call.state is not None:
        return _decode(call, query_bucket, key_bucket, rule)
    out = _attend_sequence(call, query_bucket, key_bucket, rule)
    if not call.return_state:
        return out, None
    start = torch.zeros(call.key.shape[0], dtype=torch.int64, device=call.key.device)
    state = _append_tokens({"count": start}, call, key_bucket)
    return out, _drop_unseen(state, rule, call.key.shape[2])


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
    query, key, value, mask = call.query, call.key, call.value, call.key_padding_mask
    if not query.numel():
        return query[..., :1].expand(*query.shape[:3], value.shape[-1])
    if mask is not None:
        query_bucket, key_bucket = (t.masked_fill(~mask[:, None, None], rule.buckets) for t in (query_bucket, key_bucket))
    rule = rule._replace(chunk=min(rule.chunk, query.shape[2]))
    scale = call.softmax_scale
    if can_use_compiled(query, key, value, query_bucket, key_bucket):
        return compiled.attend(query, key, value, query_bucket, key_bucket, rule, scale).to(query.dtype)
    outs, dtype = [], query.dtype
    query, key, value = upcast(query), upcast(key), upcast(value)  # once, so that the gradients of heads are not added in half
    for head in range(query.shape[1]):  # one at a time: the masks of all heads would be large
        kv_head = head // (query.shape[1] // key.shape[1])
        x = Tokens.of(query[:, head, None], key[:, kv_head, None], value[:, kv_head, None], None)
        tokens = _SortedTokens.of(query_bucket[:, head].contiguous(), key_bucket[:, kv_head].contiguous(), rule)
        if rule.shared:
            out, empty = softmax.attend([tokens.adjacent_chunks(x)], x.length, scale)
            out = torch.where(empty.unsqueeze(-1), x.value[:, 0], out)
        else:
            own_key = Blocks(64, ends=0).tile_groups(x)
            out, _ = softmax.attend([tokens.chunk_pairs(x), *own_key], x.length, scale)
        outs.append(out)
    return zero_pads(torch.stack(outs, dim=1), mask).to(dtype)


@dataclass(frozen=True, eq=False)
class _SortedTokens:
    """Queries and keys of one head, sorted in every round, padded to whole chunks with token n."""

    rule: Rule
    queries: Tensor  # (B, R, c C): the token at each place of the sorted order
    keys: Tensor  # (B, R, c C)
    rank: Tensor  # (B, R, c C): of the sorted queries
    query_code: Tensor  # (B, R, n + 1), NaN for pads: a pair is visible if query less key code is between 0 and the reach
    key_code: Tensor  # (B, R, n + 1)

    @staticmethod
    def of(query_bucket: Tensor, key_bucket: Tensor, rule: Rule) -> _SortedTokens:
        """From buckets (B, R, n)."""
        length = key_bucket.shape[-1]
        token = torch.arange(length, device=key_bucket.device)
        by_key, keys = (key_bucket * length + token).sort(-1)
        by_query, queries = (by_key, keys) if rule.shared else (query_bucket * length + token).sort(-1)
        rank = token.expand_as(by_query).contiguous() if rule.shared else torch.searchsorted(by_key, by_query)
        # Codes of different buckets differ by more than any two ranks.
        spacing = 2 * (length + rule.chunk)
        dtype = torch.float32 if spacing * (rule.buckets + 1) < 2**23 else torch.float64
        query_rank, key_rank = rank, token.expand_as(by_key)
        if not rule.is_causal:
            query_rank, key_rank = query_rank // rule.chunk, key_rank // rule.chunk
        query_code = torch.zeros_like(rank).scatter(-1, queries, query_rank - int(rule.is_causal)) + query_bucket * spacing
        key_code = torch.zeros_like(rank).scatter(-1, keys, key_rank) + key_bucket * spacing
        query_code, key_code = (
            F.pad(code.to(dtype).masked_fill(bucket == rule.buckets, torch.nan), (0, 1), value=torch.nan)
            for code, bucket in ((query_code, query_bucket), (key_code, key_bucket))
        )
        missing = -length % rule.chunk
        queries, keys = (F.pad(t, (0, missing), value=length) for t in (queries, keys))
        rank = torch.cat([rank, rank[..., -1:].expand(*rank.shape[:-1], missing)], dim=-1)
        return _SortedTokens(rule, queries, keys, rank, query_code, key_code)

    def adjacent_chunks(self, x: Tokens) -> TileGroup:
        """Every chunk with itself and the one before, where queries and keys are sorted alike."""
        chunk, length = self.rule.chunk, self.queries.shape[-1]
        count = length // chunk
        token = self.keys.unflatten(-1, (count, chunk))  # (B, R, c, C)
        tiles = [Tile(0, chunk, 1, 0, 0, chunk, self._mask(x, token[:, :, :1], token[:, :, :1]))]
        if count > 1:
            both = torch.cat([token[:, :, :-1], token[:, :, 1:]], dim=-1)  # (B, R, c - 1, 2 C)
            tiles.append(Tile(chunk, chunk, count - 1, 0, chunk, 2 * chunk, self._mask(x, token[:, :, 1:], both)))
        return self._tile_group(x, self.queries, self.keys, tiles)

    def chunk_pairs(self, x: Tokens) -> TileGroup:
        """Chunks of sorted queries with the chunks of sorted keys that they reach: on average at most three per chunk."""
        chunk = self.rule.chunk
        reached = self.rank.unflatten(-1, (-1, chunk)) // chunk  # (B, R, c, C)
        count = reached.shape[2]
        first, last = reached[..., 0] - 1, reached[..., -1]
        ends = (last - first + 1).cumsum(-1).contiguous()  # (B, R, c)
        pair = torch.arange(3 * count, device=reached.device).expand(*ends.shape[:2], -1).contiguous()
        query_chunk = torch.searchsorted(ends, pair, right=True)  # (B, R, p); c for pairs that are not needed
        is_used = query_chunk < count
        query_chunk = query_chunk.clamp(max=count - 1)
        key_chunk = pair - ends.gather(-1, query_chunk) + last.gather(-1, query_chunk) + 1
        is_used = is_used & (key_chunk >= 0) & (key_chunk < count)
        queries, keys = (
            torch.where(is_used.unsqueeze(-1), _gather_chunks(token, index.clamp(0, count - 1), chunk), x.length)
            for token, index in ((self.queries, query_chunk), (self.keys, key_chunk))
        )  # (B, R, p, C)
        tile = Tile(0, chunk, pair.shape[-1], 0, chunk, chunk, self._mask(x, queries, keys))
        return self._tile_group(x, queries.flatten(2), keys.flatten(2), [tile])

    def _mask(self, x: Tokens, queries: Tensor, keys: Tensor) -> Tensor:
        """Tokens (B, R, t, rows) and (B, R, t, columns): what to add to their scores, (B R, t, rows, columns)."""
        masked = queries.new_full((), MASKED, dtype=x.query.dtype)
        masks = []
        for now in range(self.rule.rounds):
            i, j = queries[:, now], keys[:, now]  # (B, t, rows), (B, t, columns)
            visible = self._visible(now, i, j)
            if not self.rule.is_causal:
                visible &= i.unsqueeze(-1) != j.unsqueeze(-2)
            for before in range(now):
                visible &= ~self._visible(before, i, j)
            masks.append(torch.where(visible, 0.0, masked))
        return torch.stack(masks, dim=1).flatten(0, 1)

    def _visible(self, now: int, i: Tensor, j: Tensor) -> Tensor:
        reach = self.rule.chunk - 1 if self.rule.is_causal else 1
        query, key = (
            code[:, now].gather(-1, token.flatten(1)).view(token.shape)
            for code, token in ((self.query_code, i), (self.key_code, j))
        )
        return ((query - reach / 2).unsqueeze(-1) - key.unsqueeze(-2)).abs_() <= reach / 2

    def _tile_group(self, x: Tokens, queries: Tensor, keys: Tensor, tiles: list[Tile]) -> TileGroup:
        """Tiles over the tokens `queries` and `keys` (B, R, m), n for none."""
        query, key, value = (
            _gather_rows(t, index.clamp(max=x.length - 1))
            for t, index in ((x.query[:, 0, 0], queries), (x.key[:, 0], keys), (x.value[:, 0], keys))
        )
        return TileGroup(query.unsqueeze(2), key, value, tiles, queries.flatten(1))


def _gather_chunks(x: Tensor, index: Tensor, chunk: int) -> Tensor:
    """The chunks `index` (B, R, p) of x (B, R, c C): (B, R, p, C)."""
    x = x.unflatten(-1, (-1, chunk))
    return x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, chunk))


def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows `index` (B, R, m) of x (B, n, W): (B, R, m, W)."""
    batch, length, width = x.shape
    offset = torch.arange(batch, device=x.device)[:, None, None] * length
    return x.reshape(-1, width).index_select(0, (index + offset).flatten()).view(*index.shape, width)


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
