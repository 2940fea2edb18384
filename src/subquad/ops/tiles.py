"""Softmax over tiles: the vocabulary, and the operator in compiled code (csrc/block_sparse/tiles.cpp).

A *tile* is a run of equal blocks of queries, each of which sees one run of keys, or a few. A *tile group* is a list of tiles
over one arrangement of queries and keys. Softmax attention over a list of tile groups is over the disjoint union of the keys
that they show a query.

A pair is masked by a score of minus infinity. A query whose pairs are all masked is an *empty row* of the output: it is 0.

Z sequences, one per batch entry and key-value head, S subsequences of each, G query heads per key-value head, n queries, m
keys, D channels, E value channels; R = Z G rows of output, N queries each.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops import native_call
from subquad.ops.double_backward import forbid_double_backward
from subquad.ops.hugepages import advise_huge_pages

MASKED = -math.inf  # below every score, however large scores are


class Tile(NamedTuple):
    """`blocks` equal blocks of `rows` queries, from `first_row` on. Block b sees the `columns` keys that start at
    `first_column + b * column_step`.

    `mask` (Z S or 1, blocks or 1, rows or 1, columns) is 0, or `MASKED` for pairs to leave out. `is_causal`: query i of a
    block sees its keys 0 to i. `run_starts` (R or 1, blocks, r): block b sees r runs of `columns / r` keys instead, which start
    there. A run ends early where there are no more keys, and is left out if it starts at -1.
    """

    first_row: int
    rows: int
    blocks: int
    first_column: int
    column_step: int
    columns: int
    mask: Tensor | None = None
    is_causal: bool = False
    run_starts: Tensor | None = None


class TileGroup(NamedTuple):
    """What `tiles` show of `key` (Z, S, m, D), `value` (Z, S, m, E) to `query` (Z, S, G, n, D).

    `bias` (Z or 1, S, m) is 0, or `MASKED` for keys that no query sees. `output_row` (R or 1, S n) is the row of the output,
    0 to N - 1, that a query belongs to; several queries may share one. N discards a query. None: row i for query i.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    tiles: Sequence[Tile]
    output_row: Tensor | None = None
    bias: Tensor | None = None

    @property
    def query_heads(self) -> int:
        """G."""
        return self.query.shape[2]

    @property
    def constants(self) -> list[Tensor | None]:
        """The tensors that no gradient flows to."""
        return [self.output_row, self.bias, *(t for tile in self.tiles for t in (tile.mask, tile.run_starts))]


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `allowed`, `MASKED` elsewhere."""
    return torch.where(allowed, 0.0, MASKED).to(dtype)


def differentiable(groups: Sequence[TileGroup]) -> list[Tensor]:
    """The query, key and value of each group, which autograd must get as arguments of their own."""
    return [x for group in groups for x in (group.query, group.key, group.value)]


def save_for_backward(ctx: Any, groups: Sequence[TileGroup], *results: Tensor) -> None:
    """Save the tensors of `groups` and `results` where hooks, such as those of activation checkpointing, reach them."""
    ctx.tiles = [[tile._replace(mask=None, run_starts=None) for tile in group.tiles] for group in groups]
    constants = [t for group in groups for t in group.constants]
    ctx.save_for_backward(*results, *differentiable(groups), *constants)


def saved_groups(ctx: Any, saved: Sequence[Tensor]) -> list[TileGroup]:
    """The groups that `save_for_backward` saved, from the saved tensors without the results."""
    constants = iter(saved[3 * len(ctx.tiles) :])
    groups = []
    for number, tiles in enumerate(ctx.tiles):
        output_row, bias = next(constants), next(constants)
        filled = [tile._replace(mask=next(constants), run_starts=next(constants)) for tile in tiles]
        query, key, value = saved[3 * number : 3 * number + 3]
        groups.append(TileGroup(query, key, value, filled, output_row, bias))
    return groups


_LANES = 16  # numbers in the widest vector register
_SPAN = ("first_row", "rows", "blocks", "first_column", "column_step", "columns", "is_causal")
_MASK = ("mask_sequence", "mask_block", "mask_key", "mask_has_rows")
_Tile = native_call.structure("Tile", (*_SPAN, *_MASK, "runs", "runs_row"), (), (), ("mask", "run_start"))
_SIZES = ("sequences", "subsequences", "query_heads", "queries", "keys")
_STRIDES = ("query_head", "d_query_head", "bias_sequence", "output_row_stride")
_VIEWS = ("query", "key", "value", "d_query", "d_key", "d_value")
_TileGroup = native_call.structure("TileGroup", (*_SIZES, *_STRIDES, "tiles"), (), _VIEWS, ("bias", "output_row", "tile"))
_NUMBERS = ("groups", "length", "channels", "value_channels")
_Call = native_call.structure("Call", (*_NUMBERS, "threads"), ("scale",), (), ("group", "out", "top", "sum", "grad"))


class CompiledSoftmax(torch.autograd.Function):
    """The output (R, N, E), the largest score of each row and `sum e^(score - largest)`, (R, N); both are 0 for empty rows."""

    @staticmethod
    def forward(groups: Sequence[TileGroup], length: int, scale: float, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`_` is `differentiable(groups)`."""
        return forward(groups, length, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        groups, _, ctx.scale, *_ = inputs
        ctx.mark_non_differentiable(*output[1:])
        save_for_backward(ctx, groups, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        out, top, total, *saved = ctx.saved_tensors
        grads = backward(grad, saved_groups(ctx, saved), out, top, total, ctx.scale)
        return None, None, None, *forbid_double_backward(grads, [grad, *saved])


def _as_kernel_reads(group: TileGroup) -> TileGroup:
    """Adjacent channels, and masks transposed to (Z S or 1, blocks or 1, columns, rows or 1)."""
    query, key, value = (native_call.as_rows(x) for x in (group.query, group.key, group.value))
    output_row, bias = (None if x is None else x.contiguous() for x in (group.output_row, group.bias))
    tiles = [tile if tile.mask is None and tile.run_starts is None else _tile_as_kernel_reads(tile) for tile in group.tiles]
    return TileGroup(query, key, value, tiles, output_row, bias)


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
    results = {"out": out, "top": top, "sum": total, "grad": grad.contiguous().resolve_neg()}
    _call("tiles_backward", groups, grads, scale, results)
    return [g for found in grads for g in found.values()]
