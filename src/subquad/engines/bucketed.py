"""The bucketed engine: a query sees keys of its own bucket, those that stand near it when all are sorted.

In each round every query and every key is in a bucket. Keys are sorted by (bucket, position); a query's *place* is where its
own (bucket, position) stands among them. It sees the keys of its bucket

    bidirectional   in the chunk of C sorted keys that holds its place, and in the chunk before
    causal          among the C sorted keys before its place: the last C earlier tokens of the bucket

and, over several rounds, the union of what it sees in each: a pair is barred in all rounds but the first that shows it. A query
sees its own key too; or, where queries and keys are one (`shared`), only if it sees no other. Pads are in no bucket.

B batch, H query heads, K key-value heads, n tokens, D channels, R rounds, C tokens a chunk, c chunks, p pairs of chunks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines import dense
from subquad.engines import token_buffer as store
from subquad.engines.block_sparse import softmax as tiles
from subquad.engines.block_sparse.key_sets import Blocks, Tokens
from subquad.engines.block_sparse.plan import BARRED, Part, Tile
from subquad.masks import zero_pads
from subquad.ops import bucketed as compiled
from subquad.ops import dispatch
from subquad.ops.precision import needs_gradient
from subquad.state import StateTensors


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`buckets` in each of `rounds`, chunks of `chunk` tokens; `shared`: queries and keys are one."""

    buckets: int
    rounds: int
    chunk: int
    shared: bool
    is_causal: bool


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bucket: Tensor,
    key_bucket: Tensor,
    rule: Rule,
    *,
    key_padding_mask: Tensor | None,
    scale: float,
    seen: int = 0,
    past: StateTensors | None = None,
    return_state: bool = False,
) -> tuple[Tensor, StateTensors | None]:
    """Attention of query (B, H, n, D) to key (B, K, n, D), value (B, K, n, Dv), in buckets (B, H, R, n) and (B, K, R, n)."""
    query, key, value = (zero_pads(x, key_padding_mask) for x in (query, key, value))
    if past is not None:
        return _go_on(query, key, value, query_bucket, key_bucket, rule, key_padding_mask, scale, seen, past)
    out = _whole(query, key, value, query_bucket, key_bucket, rule, key_padding_mask, scale)
    if not return_state:
        return out, None
    start = torch.zeros(key.shape[0], dtype=torch.int64, device=key.device)
    state = _remember({"count": start}, query, key, value, key_bucket, key_padding_mask)
    return out, _forget(state, rule, key.shape[2])


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bucket: Tensor,
    key_bucket: Tensor,
    rule: Rule,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    if not query.numel():
        return query[..., :1].expand(*query.shape[:3], value.shape[-1])
    if mask is not None:
        query_bucket, key_bucket = (t.masked_fill(~mask[:, None, None], rule.buckets) for t in (query_bucket, key_bucket))
    rule = replace(rule, chunk=min(rule.chunk, query.shape[2]))
    if dispatch.can_use_compiled(query, key, value, query_bucket, key_bucket):
        return compiled.attend(query, key, value, query_bucket, key_bucket, asdict(rule), scale).to(query.dtype)
    group = query.shape[1] // key.shape[1]
    outs = []
    for head in range(query.shape[1]):  # one at a time: the masks of all would be large
        kv_head = head // group
        one = slice(head, head + 1), slice(kv_head, kv_head + 1)
        x = Tokens.of(query[:, one[0]], key[:, one[1]], value[:, one[1]], None)
        sorted_ = _Sorted.of(query_bucket[:, head].contiguous(), key_bucket[:, kv_head].contiguous(), rule)
        parts = [sorted_.neighbours(x) if rule.shared else sorted_.pairs(x)]
        parts += [] if rule.shared else Blocks(64, ends=0).parts(x)
        out, empty = tiles.attend(parts, x.length, scale)
        outs.append(torch.where(empty.unsqueeze(-1), x.value[:, 0], out) if rule.shared else out)
    out = torch.stack(outs, dim=1)
    out = out if mask is None else out.masked_fill(~mask[:, None, :, None], 0)
    return out.to(query.dtype)


@dataclass(frozen=True, eq=False)
class _Sorted:
    """Queries and keys of one head, sorted in every round. Padded to whole chunks, c C long, with token n."""

    rule: Rule
    queries: Tensor  # (B, R, c C): which token
    keys: Tensor  # (B, R, c C)
    place: Tensor  # (B, R, c C): of the sorted queries, among the keys
    query_code: Tensor  # (B, R, n + 1): query less key, between 0 and `reach`, says that a pair is visible; NaN for pads
    key_code: Tensor  # (B, R, n + 1)

    @staticmethod
    def of(query_bucket: Tensor, key_bucket: Tensor, rule: Rule) -> _Sorted:
        """From buckets (B, R, n)."""
        length = key_bucket.shape[-1]
        token = torch.arange(length, device=key_bucket.device)
        by_key, keys = (key_bucket * length + token).sort(-1)
        by_query, queries = (by_key, keys) if rule.shared else (query_bucket * length + token).sort(-1)
        place = token.expand_as(by_query).contiguous() if rule.shared else torch.searchsorted(by_key, by_query)
        # The distance between buckets exceeds every distance between places.
        apart = 2 * (length + rule.chunk)
        code = torch.float32 if apart * (rule.buckets + 1) < 2**23 else torch.float64
        places, slots = place, token.expand_as(by_key)
        if not rule.is_causal:
            places, slots = places // rule.chunk, slots // rule.chunk
        query_code = torch.zeros_like(place).scatter(-1, queries, places - int(rule.is_causal)) + query_bucket * apart
        key_code = torch.zeros_like(place).scatter(-1, keys, slots) + key_bucket * apart
        query_code, key_code = (
            F.pad(t.to(code).masked_fill(bucket == rule.buckets, torch.nan), (0, 1), value=torch.nan)
            for t, bucket in ((query_code, query_bucket), (key_code, key_bucket))
        )
        missing = -length % rule.chunk
        queries, keys = (F.pad(t, (0, missing), value=length) for t in (queries, keys))
        place = torch.cat([place, place[..., -1:].expand(*place.shape[:-1], missing)], dim=-1)
        return _Sorted(rule, queries, keys, place, query_code, key_code)

    def neighbours(self, x: Tokens) -> Part:
        """Every chunk with itself and the one before, where queries and keys are sorted alike."""
        chunk, length = self.rule.chunk, self.queries.shape[-1]
        count = length // chunk
        token = self.keys.unflatten(-1, (count, chunk))  # (B, R, c, C)
        tiles_ = [Tile(0, chunk, 1, 0, 0, chunk, self._mask(x, token[:, :, :1], token[:, :, :1]))]
        if count > 1:
            both = torch.cat([token[:, :, :-1], token[:, :, 1:]], dim=-1)  # (B, R, c - 1, 2 C)
            tiles_.append(Tile(chunk, chunk, count - 1, 0, chunk, 2 * chunk, self._mask(x, token[:, :, 1:], both)))
        return self._part(x, self.queries, self.keys, tiles_)

    def pairs(self, x: Tokens) -> Part:
        """Chunks of sorted queries with the chunks of sorted keys that they reach: three to a chunk at most, on average."""
        chunk = self.rule.chunk
        place = self.place.unflatten(-1, (-1, chunk)) // chunk  # (B, R, c, C)
        count = place.shape[2]
        first, last = place[..., 0] - 1, place[..., -1]
        ends = (last - first + 1).cumsum(-1).contiguous()  # (B, R, c)
        pair = torch.arange(3 * count, device=place.device).expand(*ends.shape[:2], -1).contiguous()
        ours = torch.searchsorted(ends, pair, right=True)  # (B, R, p): whose pair it is; c: nobody's
        there = ours < count
        ours = ours.clamp(max=count - 1)
        theirs = pair - ends.gather(-1, ours) + last.gather(-1, ours) + 1
        there = there & (theirs >= 0) & (theirs < count)
        queries, keys = (
            torch.where(there.unsqueeze(-1), _chunks(token, index.clamp(0, count - 1), chunk), x.length)
            for token, index in ((self.queries, ours), (self.keys, theirs))
        )  # (B, R, p, C)
        tile = Tile(0, chunk, pair.shape[-1], 0, chunk, chunk, self._mask(x, queries, keys))
        return self._part(x, queries.flatten(2), keys.flatten(2), [tile])

    def _mask(self, x: Tokens, queries: Tensor, keys: Tensor) -> Tensor:
        """Tokens (B, R, t, rows) and (B, R, t, columns): what to add to their scores, (B R, t, rows, columns)."""
        barred = queries.new_full((), BARRED, dtype=x.query.dtype)
        masks = []
        for now in range(self.rule.rounds):
            i, j = queries[:, now], keys[:, now]  # (B, t, rows), (B, t, columns)
            visible = self._visible(now, i, j)
            if not self.rule.is_causal:
                visible &= i.unsqueeze(-1) != j.unsqueeze(-2)
            for before in range(now):
                visible &= ~self._visible(before, i, j)
            masks.append(torch.where(visible, 0.0, barred))
        return torch.stack(masks, dim=1).flatten(0, 1)

    def _visible(self, now: int, i: Tensor, j: Tensor) -> Tensor:
        reach = self.rule.chunk - 1 if self.rule.is_causal else 1
        query, key = (
            code[:, now].gather(-1, token.flatten(1)).view(token.shape)
            for code, token in ((self.query_code, i), (self.key_code, j))
        )
        return ((query - reach / 2).unsqueeze(-1) - key.unsqueeze(-2)).abs_() <= reach / 2

    def _part(self, x: Tokens, queries: Tensor, keys: Tensor, tiles_: list[Tile]) -> Part:
        """Queries and keys by token, (B, R, m), n for none."""
        query, key, value = (
            _rows(t, index.clamp(max=x.length - 1))
            for t, index in ((x.query[:, 0, 0], queries), (x.key[:, 0], keys), (x.value[:, 0], keys))
        )
        return Part(query.unsqueeze(2), key, value, tiles_, queries.flatten(1))


def _chunks(x: Tensor, index: Tensor, chunk: int) -> Tensor:
    """The chunks `index` (B, R, p) of x (B, R, c C): (B, R, p, C)."""
    x = x.unflatten(-1, (-1, chunk))
    return x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, chunk))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows `index` (B, R, m) of x (B, n, W): (B, R, m, W)."""
    batch, length, width = x.shape
    offset = torch.arange(batch, device=x.device)[:, None, None] * length
    return x.reshape(-1, width).index_select(0, (index + offset).flatten()).view(*index.shape, width)


def _go_on(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bucket: Tensor,
    key_bucket: Tensor,
    rule: Rule,
    mask: Tensor | None,
    scale: float,
    seen: int,
    state: StateTensors,
) -> tuple[Tensor, StateTensors]:
    """A few tokens at a time: they join the keys of the state, and meet those that they see."""
    outs = [query[:, :, :0, :1].expand(-1, -1, -1, value.shape[-1])]
    for start in range(0, query.shape[2], store.STEP):
        now = slice(start, start + store.STEP)
        real = None if mask is None else mask[:, now]
        state = _remember(state, query[:, :, now], key[:, :, now], value[:, :, now], key_bucket[..., now], real)
        out = _step(query[:, :, now], query_bucket[..., now], state, rule, scale)
        outs.append(out if real is None else out.masked_fill(~real[:, None, :, None], 0))
        seen += out.shape[2]
        state = _forget(state, rule, seen)
    return torch.cat(outs, dim=2), state


def _step(query: Tensor, query_bucket: Tensor, state: StateTensors, rule: Rule, scale: float) -> Tensor:
    key, value, position, bucket = (store.rows(state[name]) for name in ("key", "value", "number", "bucket"))
    dtype = torch.promote_types(query.dtype, key.dtype)
    group, length, count = query.shape[1] // key.shape[1], query.shape[2], state["count"]
    assert isinstance(count, Tensor)
    i = (count[:, None] - length + torch.arange(length, device=query.device))[:, None, :, None]  # (B, 1, n, 1)
    j = position.squeeze(-1).repeat_interleave(group, dim=1).unsqueeze(2)  # (B, H, 1, S)
    buckets = bucket.repeat_interleave(group, dim=1)  # (B, H, S, R)
    visible = torch.zeros(1, dtype=torch.bool, device=query.device)
    for now in range(rule.rounds):
        match = (query_bucket[:, :, now, :, None] == buckets[:, :, None, :, now]) & (j >= 0) & (j < i)  # (B, H, n, S)
        later = match.flip(-1).cumsum(-1).flip(-1)  # with itself
        visible = visible | (match & (later <= rule.chunk))
    own = i == j
    visible = visible | (own & ~visible.any(-1, keepdim=True) if rule.shared else own)
    return dense.attend_masked(query.to(dtype), key, value.to(dtype), visible, scale).to(query.dtype)


def _remember(
    state: StateTensors, query: Tensor, key: Tensor, value: Tensor, bucket: Tensor, mask: Tensor | None
) -> StateTensors:
    count = state["count"]
    assert isinstance(count, Tensor)
    position = count[:, None] + torch.arange(key.shape[2], device=key.device)
    if mask is not None:
        position = position.masked_fill(~mask, -1)
    rows = {
        "key": key,
        "value": value,
        "number": position[:, None, :, None].expand(-1, key.shape[1], -1, -1),
        "bucket": bucket.mT,  # (B, K, n, R)
    }
    recorded = needs_gradient(query, key, value)
    return {**store.append(state, rows, recorded), "count": count + key.shape[2]}


def _forget(state: StateTensors, rule: Rule, seen: int) -> StateTensors:
    """The last C keys of every bucket, in every round."""
    bucket = store.rows(state["bucket"]).mT.contiguous()  # (B, K, R, S)

    def keep(position: Tensor) -> Tensor:
        there = torch.where((position >= 0).unsqueeze(2), bucket, -1)
        ordered, order = there.sort(dim=-1, stable=True)
        behind = torch.searchsorted(ordered, ordered, right=True) - torch.arange(ordered.shape[-1], device=order.device)
        recent = torch.zeros_like(there, dtype=torch.bool).scatter(-1, order, behind <= rule.chunk)
        return recent.any(2) & (position >= 0)

    return store.forget(state, ("number", "key", "value", "bucket"), keep, min(rule.rounds * rule.buckets * rule.chunk, seen))
