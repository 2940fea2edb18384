"""The plan of a call: the tile groups that show every query the keys of a pattern.

B batch, H query heads, K key-value heads, n tokens, D channels, E value channels, g global tokens, m extra keys; R = B H.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.masks import put_back, real_first, take_tokens
from subquad.ops.sparse.global_tokens import GlobalTokens, tokens_of_mask
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

    def without(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The gradient, output, largest score and sum (B, H, n, ...) of the other rows: these have no gradients."""
        fillers = (0.0, 0.0, math.inf, 1.0)  # a weight is e^(score - infinity) = 0
        found = [x.clone() for x in rows]
        for x, filler in zip(found, fillers, strict=True):
            x.transpose(1, 2)[self.entry[0], self.row] = filler
        return found


@dataclass(frozen=True, eq=False)
class Plan:
    """What computes a call: `parts`, and then the rows of global tokens. Gradients flow from its groups to the inputs.

    `order` (B, n) is the order of the tokens in the plan, with the real ones first, where `real` (B, n) is True; None: as they
    are.
    """

    parts: list[Part]
    global_rows: GlobalRows | None
    order: Tensor | None
    real: Tensor | None

    @staticmethod
    def of(inputs: Inputs, pattern: Pattern, is_causal: bool) -> Plan:
        batch, _, length, _ = inputs.query.shape
        order, real, lengths = None, None, torch.tensor([length], device=inputs.query.device)
        if inputs.mask is not None:
            order, real = real_first(inputs.mask)
            inputs, lengths = _reorder(inputs, order, real), real.sum(1)
        pattern = pattern.at_length(length)
        tokens = None
        if inputs.global_mask is not None:
            tokens = tokens_of_mask(inputs.global_mask)
        elif pattern.global_rule is not None:
            tokens = pattern.global_rule.tokens(lengths, length)
        allowed = real
        if tokens is not None:  # seen as global tokens, so not again in a set
            others = ~tokens.among(length)
            allowed = others if real is None else others & real
        parts = []
        for heads, key_sets in pattern.head_groups:
            given = _select_heads(inputs, heads)
            x = Tokens.of(*given, allowed, None if real is None else lengths, inputs.draw)
            groups = [group for key_set in key_sets for group in key_set.tile_groups(x)]
            if tokens is not None:
                groups.append(_global_columns(x, tokens, is_causal))
            if inputs.extra_key is not None and inputs.extra_value is not None:
                key, value = (t.to(x.key.dtype).expand(batch, -1, -1, -1) for t in (inputs.extra_key, inputs.extra_value))
                groups.append(x.tile_group_with(key, value))
            parts.append(Part(groups, heads))
        global_rows = None if tokens is None else _global_rows(inputs, real, tokens, is_causal)
        return Plan(parts, global_rows, order, real)

    def take(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Rows (B, H, n, ...) in the order of the plan, 0 for pads."""
        if self.order is None or self.real is None:
            return list(rows)
        found = [take_tokens(x if x.dim() == 4 else x.unsqueeze(-1), self.order) for x in rows]
        found = [x.masked_fill(~self.real[:, None, :, None], 0) for x in found]
        return [x if given.dim() == 4 else x.squeeze(-1) for x, given in zip(found, rows, strict=True)]

    def put_back(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of `take`."""
        if self.order is None or self.real is None:
            return list(rows)
        found = [x if x.dim() == 4 else x.unsqueeze(-1) for x in rows]
        found = [put_back(x.masked_fill(~self.real[:, None, :, None], 0), self.order) for x in found]
        return [x if given.dim() == 4 else x.squeeze(-1) for x, given in zip(found, rows, strict=True)]


def _reorder(inputs: Inputs, order: Tensor, real: Tensor) -> Inputs:
    """Everything that is given by token, in another order; pads are 0, and not global."""
    names = ("query", "key", "value", "global_query", "global_key", "global_value")
    found: dict[str, Any] = {}
    for name in names:
        x = getattr(inputs, name)
        found[name] = None if x is None else take_tokens(x, order).masked_fill(~real[:, None, :, None], 0)
    global_mask = None if inputs.global_mask is None else inputs.global_mask.gather(1, order) & real
    return inputs._replace(**found, global_mask=global_mask)


def _select_heads(inputs: Inputs, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Some query heads, and the key-value head of each."""
    if heads is None:
        return inputs.query, inputs.key, inputs.value
    kv_heads = [head * inputs.key.shape[1] // inputs.query.shape[1] for head in heads]
    return inputs.query[:, list(heads)], inputs.key[:, kv_heads], inputs.value[:, kv_heads]


def _global_columns(x: Tokens, tokens: GlobalTokens, is_causal: bool) -> TileGroup:
    """The global tokens as keys of all queries; when causal, of those after them."""
    key, value = (take_tokens(t, tokens.position.expand(len(t), -1)) for t in (x.key, x.value))
    visible = tokens.exists.unsqueeze(1)  # (B or 1, 1, g)
    if is_causal:
        visible = visible & (tokens.position.unsqueeze(1) <= torch.arange(x.length, device=tokens.position.device)[:, None])
    mask = x.repeat_per_head(additive_mask(visible, x.key.dtype)).unsqueeze(1)  # (B K or 1, 1, n or 1, g)
    return x.tile_group_with(key, value, (Tile(0, x.length, 1, 0, 0, tokens.position.shape[1], mask),))


def _global_rows(inputs: Inputs, real: Tensor | None, tokens: GlobalTokens, is_causal: bool) -> GlobalRows:
    query, key, value = inputs[:3]
    if inputs.global_query is not None and inputs.global_key is not None and inputs.global_value is not None:
        query, key, value = inputs.global_query, inputs.global_key, inputs.global_value
    batch, length = query.shape[0], query.shape[2]
    position, exists = (t.expand(batch, -1) for t in tokens[:2])
    count = position.shape[1]
    x = Tokens.of(take_tokens(query, position), key, value, real)
    tile = Tile(0, count, 1, 0, 0, count if is_causal and tokens.are_first else length)
    if is_causal and tokens.are_first:
        tile = tile._replace(is_causal=count > 1)
    elif is_causal:
        visible = torch.arange(length, device=position.device) <= tokens.position.unsqueeze(-1)  # (B or 1, g, n)
        tile = tile._replace(mask=x.repeat_per_head(additive_mask(visible, x.key.dtype)).unsqueeze(1))
    entry = exists.nonzero(as_tuple=True)
    return GlobalRows(x.tile_group((tile,)), (entry[0], entry[1]), position[entry], (batch, count))
