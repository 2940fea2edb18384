"""The plan of a call: the tile groups that show every query the keys of a pattern.

B batch, H query heads, K key-value heads, n tokens, D channels, E value channels, g global tokens, m extra keys; R = B H.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.masks import take_tokens
from subquad.ops.sparse.global_tokens import GlobalTokens, tokens_of_mask
from subquad.ops.sparse.padding import Padding
from subquad.ops.sparse.pattern import Heads, Pattern
from subquad.ops.sparse.tokens import Tokens
from subquad.ops.tiles.group import Tile, TileGroup, additive_mask


class Inputs(NamedTuple):
    """The tensors of a call."""

    query: Tensor  # (B, H, n, D)
    key: Tensor  # (B, K, n, D)
    value: Tensor  # (B, K, n, E)
    mask: Tensor | None = None  # (B, n) bool, False for pads
    global_mask: Tensor | None = None  # (B, n) bool; replaces the global tokens of the pattern
    extra_key: Tensor | None = None  # (K, m, D), or (B, K, m, D): keys that every query sees as well
    extra_value: Tensor | None = None  # (K, m, E), or (B, K, m, E)
    global_query: Tensor | None = None  # (B, H, n, D): what the rows of global tokens use instead of query, key and value
    global_key: Tensor | None = None  # (B, K, n, D)
    global_value: Tensor | None = None  # (B, K, n, E)
    draw: Tensor | None = None  # (H,) int64, the hash keys of random blocks


class Part(NamedTuple):
    """Tile groups, and the query heads whose rows they compute."""

    groups: list[TileGroup]
    heads: Heads


class GlobalRows(NamedTuple):
    """The rows of global tokens, which see all tokens, or when causal all before them."""

    group: TileGroup
    entry: tuple[Tensor, Tensor]  # (batch, place among the g entries) of those that exist
    row: Tensor  # of these entries
    shape: tuple[int, int]  # (B, g)

    def put(self, rows: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Write `found` (R, g, ...) into rows (B, H, n, ...)."""
        for to, x in zip(rows, found, strict=True):
            by_entry = x.unflatten(0, (self.shape[0], -1)).transpose(1, 2)
            to.transpose(1, 2)[self.entry[0], self.row] = by_entry[self.entry]

    def take(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of `put`; 0 for entries that do not exist."""
        found = []
        for x in rows:
            by_entry = x.new_zeros(*self.shape, x.shape[1], *x.shape[3:])
            by_entry[self.entry] = x.transpose(1, 2)[self.entry[0], self.row]
            found.append(by_entry.transpose(1, 2).flatten(0, 1))
        return found

    def without(self, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """The largest score and the sum (B, H, n) of each row; those of these rows are such that all weights are 0."""
        top, total = top.clone(), total.clone()
        top.transpose(1, 2)[self.entry[0], self.row] = math.inf  # a weight is e^(score - infinity)
        total.transpose(1, 2)[self.entry[0], self.row] = 1
        return top, total


@dataclass(frozen=True, eq=False)
class Plan:
    """What computes a call: `parts`, and then the rows of global tokens. Gradients flow from its groups to the inputs."""

    parts: list[Part]
    global_rows: GlobalRows | None
    padding: Padding

    @staticmethod
    def of(inputs: Inputs, pattern: Pattern, is_causal: bool, with_spans: bool) -> Plan:
        """`with_spans`: for the compiled kernel, which takes the spans of real tokens."""
        batch, _, length, _ = inputs.query.shape
        pattern = pattern.at_length(length)
        inputs, padding = _arranged(inputs, pattern, with_spans)
        lengths = torch.tensor([length], device=inputs.query.device) if padding.lengths is None else padding.lengths
        tokens = None
        if inputs.global_mask is not None:
            tokens = tokens_of_mask(inputs.global_mask, padding.span)
        elif pattern.global_rule is not None:
            tokens = pattern.global_rule.tokens(lengths, length)
        allowed = padding.real
        if tokens is not None:  # seen as global tokens, so not again in a set
            others = ~tokens.among(length)
            allowed = others if allowed is None else others & allowed
        parts = []
        for heads, key_sets in pattern.head_groups:
            given = _select_heads(inputs, heads)
            x = Tokens.of(*given, allowed, padding.lengths, padding.span, inputs.draw)
            groups = [group for key_set in key_sets for group in key_set.tile_groups(x)]
            if tokens is not None:
                groups.append(_global_columns(x, tokens, is_causal))
            if inputs.extra_key is not None and inputs.extra_value is not None:
                key, value = (t.to(x.key.dtype).expand(batch, -1, -1, -1) for t in (inputs.extra_key, inputs.extra_value))
                groups.append(x.tile_group_with(key, value))
            parts.append(Part(groups, heads))
        global_rows = None if tokens is None else _global_rows(inputs, padding, tokens, is_causal)
        if global_rows is not None and len(parts) == 1 and inputs.global_key is None:
            key, value = x.keys
            global_rows = global_rows._replace(group=global_rows.group._replace(key=key, value=value))
        return Plan(parts, global_rows, padding)


def _arranged(inputs: Inputs, pattern: Pattern, with_spans: bool) -> tuple[Inputs, Padding]:
    """The inputs in the order of the plan, in which real tokens are adjacent."""
    if inputs.mask is None:
        return inputs, Padding()
    is_shiftable = all(key_set.is_shiftable for _, key_sets in pattern.head_groups for key_set in key_sets)
    padding = Padding.of(inputs.mask, with_spans, is_shiftable)
    if padding.order is None:
        global_mask = None if inputs.global_mask is None else inputs.global_mask & inputs.mask
        return inputs._replace(global_mask=global_mask), padding
    names = ("query", "key", "value", "global_query", "global_key", "global_value")
    given = {name: getattr(inputs, name) for name in names}
    found = {name: padding.take(x) for name, x in given.items() if x is not None}
    if inputs.global_mask is not None:
        found["global_mask"] = (inputs.global_mask & inputs.mask).gather(1, padding.order)
    return inputs._replace(**found), padding


def _select_heads(inputs: Inputs, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Some query heads, and the key-value head of each."""
    if heads is None:
        return inputs.query, inputs.key, inputs.value
    kv_heads = [head * inputs.key.shape[1] // inputs.query.shape[1] for head in heads]
    return inputs.query[:, list(heads)], inputs.key[:, kv_heads], inputs.value[:, kv_heads]


def _global_columns(x: Tokens, tokens: GlobalTokens, is_causal: bool) -> TileGroup:
    """The global tokens as keys of all queries; when causal, of those after them."""
    key, value, _ = x.keys_at(tokens.position, tokens.exists)
    visible = tokens.exists.unsqueeze(1)  # (B or 1, 1, g)
    if is_causal:
        visible = visible & (tokens.position.unsqueeze(1) <= torch.arange(x.length, device=tokens.position.device)[:, None])
    mask = x.repeat_per_head(additive_mask(visible, x.key.dtype)).unsqueeze(1)  # (B K or 1, 1, n or 1, g)
    return x.tile_group_with(key, value, (Tile(0, x.length, 1, 0, 0, tokens.position.shape[1], mask),))


def _global_rows(inputs: Inputs, padding: Padding, tokens: GlobalTokens, is_causal: bool) -> GlobalRows:
    query, key, value = inputs[:3]
    if inputs.global_query is not None and inputs.global_key is not None and inputs.global_value is not None:
        query, key, value = inputs.global_query, inputs.global_key, inputs.global_value
    batch, _, length, _ = query.shape
    row = tokens.position if padding.span is None else tokens.position + padding.span[:, :1]
    row, exists = (t.expand(batch, -1) for t in (torch.where(tokens.exists, row, 0), tokens.exists))
    count = row.shape[1]
    queries = take_tokens(query, row).masked_fill(~exists[:, None, :, None], 0)
    x = Tokens.of(queries, key, value, padding.real, padding.lengths, padding.span)
    tile = Tile(0, count, 1, 0, 0, min(count, length) if is_causal and tokens.are_first else length)
    if is_causal and tokens.are_first:
        tile = tile._replace(is_causal=count > 1)
    elif is_causal:
        visible = torch.arange(length, device=row.device) <= tokens.position.unsqueeze(-1)  # (B or 1, g, n)
        tile = tile._replace(mask=x.repeat_per_head(additive_mask(visible, x.key.dtype)).unsqueeze(1))
    entry = exists.nonzero(as_tuple=True)
    group = x.tile_group((tile,))._replace(query_span=None)
    return GlobalRows(group, (entry[0], entry[1]), row[entry], (batch, count))
