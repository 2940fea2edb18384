"""Softmax over tile groups in compiled code; csrc/block_sparse/tiles.cpp says how.

Z sequences, one per batch entry and key-value head, S subsequences of each, G query heads per key-value head; R = Z G rows of
output, N queries each, E value channels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops import native_call
from subquad.ops.hugepages import advise_huge_pages
from subquad.ops.tiles.group import Tile, TileGroup

_LANES = 16  # numbers in the widest vector register
_SPAN = ("first_row", "rows", "blocks", "first_column", "column_step", "columns", "is_causal")
_MASK = ("mask_sequence", "mask_block", "mask_key", "mask_has_rows")
_Tile = native_call.structure("Tile", (*_SPAN, *_MASK, "runs", "runs_row"), (), (), ("mask", "run_start"))
_SIZES = ("sequences", "subsequences", "query_heads", "queries", "keys")
_STRIDES = ("query_head", "d_query_head", "bias_sequence", "output_row_stride")
_VIEWS = ("query", "key", "value", "d_query", "d_key", "d_value")
_GROUP_POINTERS = ("bias", "output_row", "query_span", "key_span", "tile")
_TileGroup = native_call.structure("TileGroup", (*_SIZES, *_STRIDES, "tiles"), (), _VIEWS, _GROUP_POINTERS)
_NUMBERS = ("groups", "length", "channels", "value_channels")
_Call = native_call.structure("TilesCall", (*_NUMBERS, "threads"), ("scale",), (), ("group", "out", "top", "sum", "grad"))


def forward(groups: Sequence[TileGroup], length: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The output (R, N, E), the largest score of each row and `sum e^(score - largest)`, (R, N); both are 0 for empty rows."""
    groups = [_as_kernel_reads(group) for group in groups]
    query, value = groups[0].query, groups[0].value
    out = advise_huge_pages(query.new_empty(query.shape[0] * query.shape[2], length, value.shape[-1]))
    top, total = out.new_empty(out.shape[:2]), out.new_empty(out.shape[:2])
    _call("tiles_forward", groups, [{} for _ in groups], scale, {"out": out, "top": top, "sum": total})
    return out, top, total


def backward(grad: Tensor, groups: Sequence[TileGroup], out: Tensor, top: Tensor, total: Tensor, scale: float) -> list[Tensor]:
    """The gradients of query, key and value of each group, from that of the output and what `forward` returned."""
    groups = [_as_kernel_reads(group) for group in groups]
    grads = []
    for group in groups:
        query, key, value = (advise_huge_pages(torch.empty_like(x)) for x in (group.query, group.key, group.value))
        grads.append({"d_query": query, "d_key": key.zero_(), "d_value": value.zero_()})
    results = {"out": out, "top": top, "sum": total, "grad": grad.resolve_neg()}
    _call("tiles_backward", groups, grads, scale, {name: x.contiguous() for name, x in results.items()})
    return [g for found in grads for g in found.values()]


def _as_kernel_reads(group: TileGroup) -> TileGroup:
    """Adjacent channels, and masks transposed to (Z S or 1, blocks or 1, columns, rows or 1)."""
    query, key, value = (native_call.as_rows(x) for x in (group.query, group.key, group.value))
    output_row, bias = (None if x is None else x.contiguous() for x in (group.output_row, group.bias))
    tiles = [tile if tile.mask is None and tile.run_starts is None else _tile_as_kernel_reads(tile) for tile in group.tiles]
    return TileGroup(query, key, value, tiles, output_row, bias, *(x if x is None else x.contiguous() for x in group[6:]))


def _tile_as_kernel_reads(tile: Tile) -> Tile:
    mask = tile.mask
    if mask is not None:
        rows = mask.shape[2]
        mask = F.pad(mask.mT, (0, -rows % _LANES if rows > 1 else 0)).contiguous()
    return tile._replace(mask=mask, run_starts=None if tile.run_starts is None else tile.run_starts.contiguous())


def _call(
    function: str,
    groups: Sequence[TileGroup],
    grads: Sequence[Mapping[str, Tensor]],
    scale: float,
    tensors: Mapping[str, Tensor],
) -> None:
    tiles = [(_Tile * len(group.tiles))(*map(_tile_structure, group.tiles)) for group in groups]
    array = (_TileGroup * len(groups))(*map(_group_structure, groups, grads, tiles))
    out = tensors["out"]
    sizes = (len(groups), out.shape[1], groups[0].query.shape[-1], out.shape[2])
    numbers = {**dict(zip(_NUMBERS, sizes, strict=True)), "scale": scale, "group": ctypes.addressof(array)}
    pairs = sum(tile.blocks * tile.rows * tile.columns * g.query.shape[:3].numel() for g in groups for tile in g.tiles)
    native_call.call(function, _Call, numbers, {}, tensors, pairs * 2 * out.shape[2])


def _group_structure(group: TileGroup, grads: Mapping[str, Tensor], tiles: Any) -> Any:
    sizes = (*group.query.shape[:4], group.key.shape[2])
    found = _TileGroup(**dict(zip(_SIZES, sizes, strict=True)), tiles=len(tiles), tile=ctypes.addressof(tiles))
    for name, x in {"query": group.query, "key": group.key, "value": group.value, **grads}.items():
        if x.dim() == 5:
            setattr(found, f"{name}_head", x.stride(2))
            x = x[:, :, 0]
        setattr(found, name, native_call.View(x.data_ptr(), *x.stride()[:3]))
    if group.bias is not None:
        found.bias, found.bias_sequence = group.bias.data_ptr(), _stride(group.bias, 0)
    for name, span in (("query_span", group.query_span), ("key_span", group.key_span)):
        setattr(found, name, None if span is None else span.data_ptr())
    if group.output_row is not None:
        found.output_row, found.output_row_stride = group.output_row.data_ptr(), _stride(group.output_row, 0)
    return found


def _tile_structure(tile: Tile) -> Any:
    found = _Tile(**{name: getattr(tile, name) for name in _SPAN})
    if tile.mask is not None:
        found.mask, found.mask_has_rows = tile.mask.data_ptr(), tile.mask.shape[3] > 1
        found.mask_sequence, found.mask_block, found.mask_key = (_stride(tile.mask, dim) for dim in range(3))
    if tile.run_starts is not None:
        found.run_start, found.runs = tile.run_starts.data_ptr(), tile.run_starts.shape[-1]
        found.runs_row = _stride(tile.run_starts, 0)
    return found


def _stride(x: Tensor, dim: int) -> int:
    """0 where one entry serves all."""
    return 0 if x.shape[dim] == 1 else x.stride(dim)
