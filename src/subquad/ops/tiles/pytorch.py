"""Softmax over tile groups in PyTorch: the fallback of the compiled kernel.

The softmax over a disjoint union is a weighted sum of the softmaxes over its sets. With the largest score t_p of set p and
w_p = sum_j e^(s_j - t_p) over its scores s_j:

    o = sum_p e^(t_p - t) w_p o_p / w,    t = max_p t_p,    w = sum_p e^(t_p - t) w_p

One tile is computed at a time, with PyTorch's fused kernel, and the results are merged. Keys are read through overlapping
views, never copied for a tile, and the backward pass recomputes the weights of each tile from `t`, `w` and the merged output
(Dao et al., 2022, arXiv:2205.14135), so memory stays linear. Where the fused kernel would be wrong (see `one_tile`), everything
is computed with plain operations.

Z sequences, one per batch entry and key-value head, S subsequences of each, G query heads per key-value head, n queries, m
keys, W channels; R = Z G rows of output, N queries each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.hugepages import advise_huge_pages
from subquad.ops.precision import has_nan, largest_magnitude
from subquad.ops.tiles.group import MASKED, Tile, TileGroup, differentiable, pad_to
from subquad.ops.tiles.one_tile import add_key_gradients, attend_tile, tile_gradients, tile_keys, tile_rows, undo_tile_rows
from subquad.ops.tiles.wide import Wide, gather_runs

_PIECE = 2**20  # numbers of the output that are computed at a time
_COUNTABLE = 2**18  # the rounding error of scores up to here is far below 1 in float32


def forward(groups: Sequence[TileGroup], length: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The output (R, N, E), the largest score of each row and `sum e^(score - largest)`, (R, N); both are 0 for empty rows."""
    with torch.no_grad():
        is_plain = are_uncountable(groups, scale)
        groups = [gather_runs(group) for group in groups]
        results = _forward(groups, length, scale, not is_plain)
        return results if is_plain or not has_nan(results[0]) else _forward(groups, length, scale, False)


def backward(grad: Tensor, groups: Sequence[TileGroup], out: Tensor, top: Tensor, total: Tensor, scale: float) -> list[Tensor]:
    """The gradients of query, key and value of each group, from that of the output and what `forward` returned."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [_detached(group) for group in groups]
        gathered = [gather_runs(group) for group in leaves]
    with torch.no_grad():
        is_plain = are_uncountable(groups, scale) or has_nan(out)
        if is_plain:  # rounding errors differ from those of the compiled kernel, and are large
            out, top, total = _forward(gathered, out.shape[1], scale, False)
        grads = _gradients(gathered, Wide.of(gathered, scale, not is_plain), grad, out, top, total)
    return list(torch.autograd.grad(differentiable(gathered), differentiable(leaves), grads))


def _detached(group: TileGroup) -> TileGroup:
    query, key, value = (x.detach().requires_grad_() for x in (group.query, group.key, group.value))
    return group._replace(query=query, key=key, value=value)


def are_uncountable(groups: Sequence[TileGroup], scale: float) -> bool:
    """Whether there are scores that the fused kernel must not get: NaN, or so large that their rounding errors may be too."""
    return any(has_nan(x) for group in groups for x in (group.query, group.key)) or _score_bound(groups, scale) > _COUNTABLE


def _score_bound(groups: Sequence[TileGroup], scale: float) -> float:
    """No score is larger in magnitude; 0 where that is unknown."""
    largest = [max(largest_magnitude(x) for x in tensors) for tensors in zip(*((g.query, g.key) for g in groups), strict=True)]
    return largest[0] * largest[1] * groups[0].query.shape[-1] * abs(scale)


def _forward(groups: Sequence[TileGroup], length: int, scale: float, is_fused: bool) -> tuple[Tensor, Tensor, Tensor]:
    wide, query, width = Wide.of(groups, scale, is_fused), groups[0].query, groups[0].value.shape[-1]
    out = advise_huge_pages(query.new_empty(query.shape[0] * query.shape[2], length, width))
    top, total = out.new_empty(out.shape[:2]), out.new_empty(out.shape[:2])
    for start, end in _row_pieces(out, groups):
        pieces = [_slice_rows(group, start, end) for group in wide.groups]
        results = [_attend_group(piece, wide) for piece in pieces]
        merged, level, total[start:end] = _merge(results, [piece.output_row for piece in pieces], length)
        out[start:end] = merged[..., :width]
        top[start:end] = level.masked_fill_(level == MASKED, 0)  # so that e^(score - top) of a masked pair is 0
    return out, top, total


def _gradients(groups: Sequence[TileGroup], wide: Wide, grad: Tensor, out: Tensor, top: Tensor, total: Tensor) -> list[Tensor]:
    """The gradients of query, key and value of each of the `groups`."""
    grad, out = pad_to(grad, wide.width, -1), pad_to(out, wide.width, -1)
    total = total.masked_fill(total == 0, 1)
    grads = [[x.new_zeros(x.shape) for x in (group.query, group.key, group.value)] for group in wide.groups]  # contiguous
    for start, end in _row_pieces(out, groups):
        for group, totals in zip(wide.groups, grads, strict=True):
            piece, sequences = _slice_rows(group, start, end), slice(start // group.query_heads, end // group.query_heads)
            results = [t[start:end] for t in (grad, out, top, total)]
            if piece.output_row is not None:
                results = [_gather_rows(t, piece.output_row, filler) for t, filler in zip(results, (0, 0, 0, 1), strict=True)]
            _add_group_gradients(piece, results, [total[sequences] for total in totals], wide)
    found = [g[..., : x.shape[-1]] for g, x in zip(itertools.chain(*grads), differentiable(groups), strict=True)]
    if wide.factor != 1:
        found[::3] = [d_query * wide.factor for d_query in found[::3]]
    return found


def _row_pieces(out: Tensor, groups: Sequence[TileGroup]) -> list[tuple[int, int]]:
    """Rows of the output to compute at a time: few enough to stay in cache, enough for every thread."""
    rows, unit = out.shape[0], max(group.query_heads for group in groups)
    step = max(_PIECE // max(out[0].numel() if rows else 1, 1), torch.get_num_threads())
    step = -(-step // unit) * unit
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _slice_rows(group: TileGroup, start: int, end: int) -> TileGroup:
    """What concerns the rows `start` to `end` of the output."""
    sequences, first, last = group.query.shape[0], start // group.query_heads, end // group.query_heads
    if last - first == sequences:
        return group

    def cut(x: Tensor | None, each: int) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 else x[first * each : last * each]

    tiles = [tile._replace(mask=cut(tile.mask, group.query.shape[1])) for tile in group.tiles]
    query, key, value = (x[first:last] for x in (group.query, group.key, group.value))
    return TileGroup(query, key, value, tiles, cut(group.output_row, group.query_heads))


def _split_tile(tile: Tile, group: TileGroup) -> list[Tile]:
    """Fewer blocks at a time, where the gradients of all their keys would not stay in cache."""
    if tile.blocks == 1:
        return [tile]
    sequences, subsequences, _, width = group.key.shape
    count = max(_PIECE // max(sequences * subsequences * tile.columns * width, 1), 1)

    def blocks(first: int) -> Tile:
        number = min(count, tile.blocks - first)
        mask = tile.mask if tile.mask is None or tile.mask.shape[1] == 1 else tile.mask[:, first : first + number]
        row, column = tile.first_row + first * tile.rows, tile.first_column + first * tile.column_step
        return tile._replace(first_row=row, blocks=number, first_column=column, mask=mask)

    return [blocks(first) for first in range(0, tile.blocks, count)]


def _attend_group(group: TileGroup, wide: Wide) -> tuple[Tensor, Tensor, Tensor]:
    """The output (R, S n, W) of the group, its largest score and sum, (R, S n), as `attend_tile` returns them."""
    query = group.query
    results = torch.empty_like(query), query.new_empty(*query.shape[:-1], 1), query.new_empty(*query.shape[:-1], 1)
    tiles = group.tiles if wide.is_fused else [part for tile in group.tiles for part in _split_tile(tile, group)]
    for tile in tiles:
        key, value = (tile_keys(x, tile, query) for x in (group.key, group.value))
        rows = slice(tile.first_row, tile.first_row + tile.blocks * tile.rows)
        for result, found in zip(results, attend_tile(tile_rows(query, tile), key, value, tile, wide), strict=True):
            result[:, :, :, rows] = undo_tile_rows(found, tile, query)
    out, top, total = map(_output_rows, results)
    return out, top.squeeze(-1), total.squeeze(-1)


def _add_group_gradients(group: TileGroup, results: Sequence[Tensor], grads: Sequence[Tensor], wide: Wide) -> None:
    """Add to the gradients of query, key and value; `results` (R, S n, ...): the output's gradient, output, top and total."""
    query = group.query
    results = [_undo_output_rows(x if x.dim() == 3 else x.unsqueeze(-1), query) for x in results]
    for tile in itertools.chain.from_iterable(_split_tile(tile, group) for tile in group.tiles):
        key, value = (tile_keys(x, tile, query) for x in (group.key, group.value))
        found = tile_gradients(tile_rows(query, tile), key, value, [tile_rows(x, tile) for x in results], tile, wide)
        rows = slice(tile.first_row, tile.first_row + tile.blocks * tile.rows)
        grads[0][:, :, :, rows] = undo_tile_rows(found[0], tile, query)
        for total, new in zip(grads[1:], found[1:], strict=True):
            add_key_gradients(total.flatten(0, 1), new, tile)


def _merge(
    results: Sequence[tuple[Tensor, Tensor, Tensor]], rows: Sequence[Tensor | None], length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of all groups in one; `rows` are the output rows of each."""
    if len(results) == 1 and rows[0] is None:
        return results[0]
    tops = [_scatter_rows(top, row, length, "amax") for (_, top, _), row in zip(results, rows, strict=True)]
    largest = torch.stack(tops).amax(0)
    largest = largest.masked_fill_(largest == MASKED, 0)  # no infinity less infinity in empty rows
    total, out = torch.zeros_like(largest), torch.zeros_like(results[0][0][:, :1]).repeat(1, length, 1)
    for (o, top, sums), row in zip(results, rows, strict=True):
        weight = (top - (largest if row is None else _gather_rows(largest, row))).exp() * sums
        total += _scatter_rows(weight, row, length, "sum")
        out += _scatter_rows(o * weight.unsqueeze(-1), row, length, "sum")
    return out.div_(total.masked_fill(total == 0, 1).unsqueeze(-1)), largest, total


def _scatter_rows(x: Tensor, row: Tensor | None, length: int, reduce: str) -> Tensor:
    """x (R, n, ...) at the rows `row` of (R, N, ...): the sum or the largest of those that share a row."""
    if row is None:
        return x
    target = x.new_full((x.shape[0], length + 1, *x.shape[2:]), MASKED if reduce == "amax" else 0.0)
    return target.scatter_reduce_(1, _row_index(row, x), x, reduce).narrow(1, 0, length)


def _gather_rows(x: Tensor, row: Tensor, filler: float = 0) -> Tensor:
    """The rows `row` of x (R, N, ...), `filler` for row N."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, 1), value=filler).gather(1, _row_index(row, x))


def _row_index(row: Tensor, x: Tensor) -> Tensor:
    """`row` (R or 1, n) as an index into x (R, N) or (R, N, W)."""
    row = row.expand(x.shape[0], -1)
    return row if x.dim() == 2 else row.unsqueeze(-1).expand(-1, -1, x.shape[2])


def _output_rows(x: Tensor) -> Tensor:
    """(Z, S, G, n, W) -> (Z G, S n, W)."""
    return x.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _undo_output_rows(x: Tensor, query: Tensor) -> Tensor:
    """(Z G, S n, W) -> (Z, S, G, n, W)."""
    sequences, subsequences, query_heads, queries, _ = query.shape
    return x.reshape(sequences, query_heads, subsequences, queries, x.shape[-1]).transpose(1, 2)
