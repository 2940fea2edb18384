"""The plan of a whole sequence: the tile groups that show every query the keys of the layout.

B batch, H query heads, K key-value heads, n tokens, g global tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.engines.block_sparse.key_sets import KeySet, Tokens
from subquad.engines.block_sparse.layout import GlobalTokens, Heads, Layout
from subquad.engines.call import Call
from subquad.masks import take_tokens
from subquad.ops.tiles import Tile, TileGroup, additive_mask


def plan(call: Call, layout: Layout, heads: Heads, key_sets: tuple[KeySet, ...]) -> list[TileGroup]:
    """The tile groups for the queries of `heads`, which see `key_sets`, the global tokens and the extra keys."""
    allowed, tokens = call.key_padding_mask, layout.global_tokens
    if tokens is not None:  # seen as global tokens, so not again in a set
        others = ~_is_global(tokens, call.query.shape[0], call.query.shape[2])
        allowed = others if allowed is None else others & allowed
    x = Tokens.of(*_select_heads(call, heads), allowed)
    groups = [group for key_set in key_sets for group in key_set.tile_groups(x)]
    if tokens is not None:
        groups.append(_global_columns(x, tokens, call.is_causal))
    if layout.extra is not None:
        key, value = (t.to(x.key.dtype).expand(call.key.shape[0], -1, -1, -1) for t in layout.extra)
        groups.append(x.tile_group_with(key, value))
    return groups


def _select_heads(call: Call, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Some query heads, and the key-value head of each."""
    if heads is None:
        return call.query, call.key, call.value
    kv_heads = [head * call.key.shape[1] // call.query.shape[1] for head in heads]
    return call.query[:, list(heads)], call.key[:, kv_heads], call.value[:, kv_heads]


def _is_global(tokens: GlobalTokens, batch: int, length: int) -> Tensor:
    """(B, n) bool."""
    found = torch.zeros(batch, length + 1, dtype=torch.bool, device=tokens.position.device)
    return found.scatter(1, torch.where(tokens.exists, tokens.position, length).expand(batch, -1), True)[:, :length]


def _global_columns(x: Tokens, tokens: GlobalTokens, is_causal: bool) -> TileGroup:
    """The global tokens as keys of all queries; when causal, of those after them."""
    key, value = (take_tokens(t, tokens.position.expand(len(t), -1)) for t in (x.key, x.value))
    visible = tokens.exists.unsqueeze(1)  # (B or 1, 1, g)
    if is_causal:
        visible = visible & (tokens.position.unsqueeze(1) <= torch.arange(x.length, device=tokens.position.device)[:, None])
    mask = x.repeat_per_head(additive_mask(visible, x.key.dtype)).unsqueeze(1)  # (B K or 1, 1, n or 1, g)
    return x.tile_group_with(key, value, (Tile(0, x.length, 1, 0, 0, tokens.position.shape[1], mask),))
