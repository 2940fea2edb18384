"""Tile groups as PyTorch's fused attention kernel needs them.

Z sequences, S subsequences of each, G query heads per key-value head, n queries, m keys, W channels; R = Z G rows of output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.ops.tiles.group import TileGroup, additive_mask, pad_to


class Wide(NamedTuple):
    """Tile groups as the fused kernel needs them: queries, keys and values of one width.

    A bias becomes the last channel of the keys; that of the queries is 1.
    """

    groups: list[TileGroup]
    factor: float  # on the queries, already applied
    scale: float  # still to be applied
    has_bias: bool
    width: int
    is_fused: bool  # computed by the fused kernel, where there is one

    @staticmethod
    def of(groups: Sequence[TileGroup], scale: float, is_fused: bool) -> Wide:
        has_bias = any(group.bias is not None for group in groups)
        width = max(groups[0].query.shape[-1] + has_bias, groups[0].value.shape[-1])
        # The kernel would scale the bias, or the mask of a causal tile.
        factor, scale = (scale, 1.0) if has_bias or scale <= 0 else (1.0, scale)
        wide = [_widen(group, factor, has_bias, width) for group in groups]
        return Wide(wide, factor, scale, has_bias, width, is_fused)


def _widen(group: TileGroup, factor: float, has_bias: bool, width: int) -> TileGroup:
    query, key, value = group.query if factor == 1 else group.query * factor, group.key, group.value
    if has_bias:
        bias = key.new_zeros(()) if group.bias is None else group.bias.unsqueeze(-1)
        query, key = _with_last_channel(query, query.new_ones(()), width), _with_last_channel(key, bias, width)
    query, key, value = (_adjacent_channels(pad_to(x, width, -1)) for x in (query, key, value))
    return group._replace(query=query, key=key, value=value, bias=None)


def _adjacent_channels(x: Tensor) -> Tensor:
    """With channels adjacent in memory, which the fused kernel takes for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_last_channel(x: Tensor, last: Tensor, width: int) -> Tensor:
    """x (..., D), zeros, and `last` as the last of `width` channels."""
    return torch.cat([pad_to(x, width - 1, -1), last.expand(*x.shape[:-1], 1)], dim=-1)


def gather_runs(group: TileGroup) -> TileGroup:
    """Where tiles have `run_starts`: their keys, copied next to each other, (R, 1, ...)."""
    assert group.query_span is None
    assert group.key_span is None
    if all(tile.run_starts is None for tile in group.tiles):
        return group
    (sequences, _, query_heads, queries, _), keys = group.query.shape, group.key.shape[2]
    rows, tiles, index, first = sequences * query_heads, [], [], 0
    for tile in group.tiles:
        assert tile.run_starts is not None
        size = tile.columns // tile.run_starts.shape[-1]
        position = tile.run_starts.unsqueeze(-1) + torch.arange(size, device=tile.run_starts.device)
        position = torch.where((tile.run_starts.unsqueeze(-1) >= 0) & (position < keys), position, keys)
        index.append(position.flatten(1).expand(rows, -1))
        tiles.append(tile._replace(first_column=first, column_step=tile.columns, run_starts=None))
        first += tile.blocks * tile.columns
    position = torch.cat(index, dim=1)  # (R, all columns), m for none
    start = torch.arange(sequences, device=position.device).repeat_interleave(query_heads)[:, None]
    flat = (position.clamp(max=keys - 1) + start * keys).flatten()
    key, value = (x.flatten(0, 2).index_select(0, flat).view(rows, 1, -1, x.shape[-1]) for x in (group.key, group.value))
    bias = additive_mask(position < keys, key.dtype)
    if group.bias is not None:
        bias = bias + group.bias.expand(sequences, -1, -1).flatten().index_select(0, flat).view_as(bias)
    query = group.query.reshape(rows, 1, 1, queries, -1)
    return TileGroup(query, key, value, tiles, group.output_row, bias.unsqueeze(1))
