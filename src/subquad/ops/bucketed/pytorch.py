"""Softmax attention inside buckets, in PyTorch: tiles of sorted tokens, one head at a time.

B batch, H query heads, K key-value heads, n tokens, D channels, E value channels, R rounds, C tokens per chunk, c chunks, p
pairs of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops import native_call
from subquad.ops.bucketed.rule import Rule
from subquad.ops.precision import upcast
from subquad.ops.sparse.key_sets import Blocks
from subquad.ops.sparse.tokens import Tokens
from subquad.ops.tiles import pytorch as tiles
from subquad.ops.tiles.group import MASKED, Tile, TileGroup, differentiable


def forward(
    query: Tensor, key: Tensor, value: Tensor, query_bucket: Tensor, key_bucket: Tensor, rule: Rule, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the largest score of each query and `sum e^(score - largest)`; 0 and 0 if only its own value counts."""
    out = native_call.empty_rows(query, value.shape[3])
    top, total = (query.new_empty(query.shape[:3], dtype=out.dtype) for _ in range(2))
    is_pad = (query_bucket[:, 0, 0] == rule.buckets).unsqueeze(-1)  # (B, n, 1)
    for head in range(query.shape[1]):  # one at a time: the masks of all heads would be large
        with torch.no_grad():
            tokens = _tokens(query, key, value, is_pad, head)
            groups = _groups(tokens, query_bucket, key_bucket, rule, head)
            found, top[:, head], total[:, head] = tiles.forward(groups, query.shape[2], scale)
            if rule.shared:
                found = torch.where((total[:, head] == 0).unsqueeze(-1), tokens[2], found)
            out[:, head] = found.masked_fill(is_pad, 0)
    return out, top.masked_fill_(is_pad.mT, 0), total.masked_fill_(is_pad.mT, 0)


def backward(
    grad: Tensor,
    out: Tensor,
    top: Tensor,
    total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bucket: Tensor,
    key_bucket: Tensor,
    rule: Rule,
    scale: float,
) -> list[Tensor]:
    """The gradients of query, key and value, from that of the output and what `forward` returned."""
    is_pad = (query_bucket[:, 0, 0] == rule.buckets).unsqueeze(-1)
    d_query, d_key, d_value = (native_call.empty_rows(x, x.shape[3]).zero_() for x in (query, key, value))
    for head in range(query.shape[1]):
        kv_head = head // (query.shape[1] // key.shape[1])
        with torch.inference_mode(False), torch.enable_grad():
            tokens = [x.clone().requires_grad_() for x in _tokens(query, key, value, is_pad, head)]
            groups = _groups(tokens, query_bucket, key_bucket, rule, head)
        with torch.no_grad():
            upstream = grad[:, head].masked_fill(is_pad, 0)
            if rule.shared:
                is_own = (total[:, head] == 0).unsqueeze(-1)
                d_value[:, kv_head] += upstream.masked_fill(~is_own, 0)
                upstream = upstream.masked_fill(is_own, 0)
            grads = tiles.backward(upstream, groups, out[:, head], top[:, head], total[:, head], scale)
        found = torch.autograd.grad(differentiable(groups), tokens, grads)
        for to, place, g in zip((d_query, d_key, d_value), (head, kv_head, kv_head), found, strict=True):
            to[:, place] += g
    return [d_query, d_key, d_value]


def _tokens(query: Tensor, key: Tensor, value: Tensor, is_pad: Tensor, head: int) -> list[Tensor]:
    """The query, key and value (B, n, ...) of a query head, 0 for pads, in the precision to compute in."""
    kv_head = head // (query.shape[1] // key.shape[1])
    return [upcast(x).masked_fill(is_pad, 0) for x in (query[:, head], key[:, kv_head], value[:, kv_head])]


def _groups(tokens: list[Tensor], query_bucket: Tensor, key_bucket: Tensor, rule: Rule, head: int) -> list[TileGroup]:
    """What a query head sees; gradients flow to its query, key and value (B, n, ...)."""
    query, key, value = (x.unsqueeze(1) for x in tokens)
    x, kv_head = Tokens.of(query, key, value), head // (query_bucket.shape[1] // key_bucket.shape[1])
    order = _SortedTokens.of(query_bucket[:, head].contiguous(), key_bucket[:, kv_head].contiguous(), rule)
    return [order.adjacent_chunks(x)] if rule.shared else [order.chunk_pairs(x), *Blocks(64, ends=0).tile_groups(x)]


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
