"""Exact softmax attention over tile groups: what the sparse engines compute.

The softmax over a disjoint union is a weighted sum of the softmaxes over its sets. With the largest score t_p of set p and
w_p = sum_j e^(s_j - t_p) over its scores s_j:

    o = sum_p e^(t_p - t) w_p o_p / w,    t = max_p t_p,    w = sum_p e^(t_p - t) w_p

The compiled kernel keeps one running softmax per query over all tile groups. The PyTorch fallback computes one tile at a time
with PyTorch's fused kernel and merges the results. It reads keys through overlapping views, never copied for a tile, and its
backward pass recomputes the weights of each tile from `t`, `w` and the merged output (Dao et al., 2022, arXiv:2205.14135), so
memory stays linear.

The fused kernel returns t + log w instead of t and w, so its results are wrong where scores are so large that adding log w
does not change them: the merge weighs sets wrongly, and gradients break down. It also adds a mask to the scores, which makes
NaN of a masked score that has overflowed or is NaN, and it makes a number of some scores that are NaN. The fallback then
computes everything with plain operations, which replace masked scores; under torch.compile it cannot.

Z sequences, one per batch entry and key-value head, S subsequences of each, G query heads per key-value head, n queries, m
keys, W channels; R = Z G rows of output, N queries each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.block_sparse.key_sets import pad_to
from subquad.ops.dispatch import can_use_compiled
from subquad.ops.double_backward import forbid_double_backward
from subquad.ops.hugepages import advise_huge_pages
from subquad.ops.precision import has_nan, largest_magnitude, needs_gradient
from subquad.ops.tiles import (
    MASKED,
    CompiledSoftmax,
    Tile,
    TileGroup,
    additive_mask,
    differentiable,
    save_for_backward,
    saved_groups,
)

_PIECE = 2**20  # numbers of the output that are computed at a time
_COUNTABLE = 2**18  # the rounding error of scores up to here is far below 1 in float32


def attend(groups: Sequence[TileGroup], length: int, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax over all keys that the groups show: the output (R, N, E), and which of its rows are empty (R, N)."""
    inputs = differentiable(groups)
    if can_use_compiled(*inputs, *(t for group in groups for t in group.constants)):
        compiled = CompiledSoftmax.apply if needs_gradient(*inputs) else CompiledSoftmax.forward
        out, _, total = compiled(groups, length, scale, *inputs)
        return out, total == 0
    is_nan = any(has_nan(x) for group in groups for x in (group.query, group.key))
    is_plain = is_nan or _score_bound(groups, scale) > _COUNTABLE
    groups = [_gather_runs(group) for group in groups]
    inputs = differentiable(groups)
    # torch.compile takes a Function with setup_context only where a gradient is recorded.
    run = _MergedSoftmax.forward if torch.compiler.is_compiling() and not needs_gradient(*inputs) else _MergedSoftmax.apply
    out, _, total = run(groups, length, scale, not is_plain, *inputs)
    if not is_plain and has_nan(out):
        out, _, total = run(groups, length, scale, False, *inputs)
    return out, total == 0


def _score_bound(groups: Sequence[TileGroup], scale: float) -> float:
    """No score is larger in magnitude; 0 where that is unknown."""
    largest = [max(largest_magnitude(x) for x in tensors) for tensors in zip(*((g.query, g.key) for g in groups), strict=True)]
    return largest[0] * largest[1] * groups[0].query.shape[-1] * abs(scale)


def _gather_runs(group: TileGroup) -> TileGroup:
    """Where tiles have `run_starts`: their keys, copied next to each other, (R, 1, ...)."""
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


class _Wide(NamedTuple):
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
    def of(groups: Sequence[TileGroup], scale: float, is_fused: bool) -> _Wide:
        has_bias = any(group.bias is not None for group in groups)
        width = max(groups[0].query.shape[-1] + has_bias, groups[0].value.shape[-1])
        # The kernel would scale the bias, or the mask of a causal tile.
        factor, scale = (scale, 1.0) if has_bias or scale <= 0 else (1.0, scale)
        wide = [_widen(group, factor, has_bias, width) for group in groups]
        return _Wide(wide, factor, scale, has_bias, width, is_fused)


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


class _MergedSoftmax(torch.autograd.Function):
    """The output (R, N, E), the largest score of each row and `sum e^(score - largest)`, (R, N); both are 0 for empty rows."""

    @staticmethod
    def forward(
        groups: Sequence[TileGroup], length: int, scale: float, is_fused: bool, *_: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`_` is `differentiable(groups)`."""
        wide, query, width = _Wide.of(groups, scale, is_fused), groups[0].query, groups[0].value.shape[-1]
        out = advise_huge_pages(query.new_empty(query.shape[0] * query.shape[2], length, width))
        top, total = out.new_empty(out.shape[:2]), out.new_empty(out.shape[:2])
        for start, end in _row_pieces(out, groups):
            pieces = [_slice_rows(group, start, end) for group in wide.groups]
            results = [_attend_group(piece, wide) for piece in pieces]
            merged, level, total[start:end] = _merge(results, [piece.output_row for piece in pieces], length)
            out[start:end] = merged[..., :width]
            top[start:end] = level.masked_fill_(level == MASKED, 0)  # so that e^(score - top) of a masked pair is 0
        return out, top, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        groups, _, ctx.scale, ctx.is_fused, *_ = inputs
        ctx.mark_non_differentiable(*output[1:])
        save_for_backward(ctx, groups, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        out, top, total, *saved = ctx.saved_tensors
        with torch.no_grad():
            groups = saved_groups(ctx, saved)
            grads = _gradients(groups, _Wide.of(groups, ctx.scale, ctx.is_fused), grad, out, top, total)
        return None, None, None, None, *forbid_double_backward(grads, [grad, *saved])


def _gradients(groups: Sequence[TileGroup], wide: _Wide, grad: Tensor, out: Tensor, top: Tensor, total: Tensor) -> list[Tensor]:
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
    if torch.compiler.is_compiling():
        return [(0, rows)]
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
    if torch.compiler.is_compiling() or tile.blocks == 1:
        return [tile]
    sequences, subsequences, _, width = group.key.shape
    count = max(_PIECE // max(sequences * subsequences * tile.columns * width, 1), 1)

    def blocks(first: int) -> Tile:
        number = min(count, tile.blocks - first)
        mask = tile.mask if tile.mask is None or tile.mask.shape[1] == 1 else tile.mask[:, first : first + number]
        row, column = tile.first_row + first * tile.rows, tile.first_column + first * tile.column_step
        return tile._replace(first_row=row, blocks=number, first_column=column, mask=mask)

    return [blocks(first) for first in range(0, tile.blocks, count)]


def _attend_group(group: TileGroup, wide: _Wide) -> tuple[Tensor, Tensor, Tensor]:
    """The output (R, S n, W) of the group, its largest score and sum, (R, S n), as `_attend_tile` returns them."""
    query = group.query
    results = torch.empty_like(query), query.new_empty(*query.shape[:-1], 1), query.new_empty(*query.shape[:-1], 1)
    tiles = group.tiles if wide.is_fused else [part for tile in group.tiles for part in _split_tile(tile, group)]
    for tile in tiles:
        key, value = (_tile_keys(x, tile, query) for x in (group.key, group.value))
        rows = slice(tile.first_row, tile.first_row + tile.blocks * tile.rows)
        for result, found in zip(results, _attend_tile(_tile_rows(query, tile), key, value, tile, wide), strict=True):
            result[:, :, :, rows] = _undo_tile_rows(found, tile, query)
    out, top, total = map(_output_rows, results)
    return out, top.squeeze(-1), total.squeeze(-1)


def _add_group_gradients(group: TileGroup, results: Sequence[Tensor], grads: Sequence[Tensor], wide: _Wide) -> None:
    """Add to the gradients of query, key and value; `results` (R, S n, ...): the output's gradient, output, top and total."""
    query = group.query
    results = [_undo_output_rows(x if x.dim() == 3 else x.unsqueeze(-1), query) for x in results]
    for tile in itertools.chain.from_iterable(_split_tile(tile, group) for tile in group.tiles):
        key, value = (_tile_keys(x, tile, query) for x in (group.key, group.value))
        found = _tile_gradients(_tile_rows(query, tile), key, value, [_tile_rows(x, tile) for x in results], tile, wide)
        rows = slice(tile.first_row, tile.first_row + tile.blocks * tile.rows)
        grads[0][:, :, :, rows] = _undo_tile_rows(found[0], tile, query)
        for total, new in zip(grads[1:], found[1:], strict=True):
            _add_key_gradients(total.flatten(0, 1), new, tile)


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


def _tile_rows(x: Tensor, tile: Tile) -> Tensor:
    """The tile's rows of x (Z, S, G, n, W): (Z S, G, rows, W) for a single block, otherwise (Z S, blocks, G rows, W)."""
    x = x[:, :, :, tile.first_row : tile.first_row + tile.blocks * tile.rows].flatten(0, 1)
    if tile.blocks == 1:
        return x
    return x.unflatten(2, (tile.blocks, tile.rows)).transpose(1, 2).flatten(2, 3)


def _undo_tile_rows(x: Tensor, tile: Tile, query: Tensor) -> Tensor:
    """The inverse of `_tile_rows`: (Z, S, G, blocks rows, W)."""
    if tile.blocks > 1:
        x = x.unflatten(2, (-1, tile.rows)).transpose(1, 2).flatten(2, 3)
    return x.unflatten(0, query.shape[:2])


def _tile_keys(x: Tensor, tile: Tile, query: Tensor) -> Tensor:
    """The tile's keys of x (Z, S, m, W), as views: (Z S, blocks, columns, W), for a single block (Z S, G, columns, W)."""
    x = x.flatten(0, 1)[:, tile.first_column : tile.first_column + (tile.blocks - 1) * tile.column_step + tile.columns]
    if tile.blocks == 1:
        return x.unsqueeze(1).expand(-1, query.shape[2], -1, -1)
    if tile.column_step == 0:
        return x.unsqueeze(1).expand(-1, tile.blocks, -1, -1)
    return x.unfold(1, tile.columns, tile.column_step).mT


def _add_key_gradients(total: Tensor, new: Tensor, tile: Tile) -> None:
    """Add new (Z S, blocks, columns, W), or a single block's (Z S, G, columns, W), to the keys of total (Z S, m, W)."""
    step, columns = tile.column_step, tile.columns
    if step == 0 or tile.blocks == 1:
        total[:, tile.first_column : tile.first_column + columns] += new.sum(1)
        return
    for start in range(0, columns, step):
        width = min(step, columns - start)
        first = tile.first_column + start
        span = total[:, first : first + (tile.blocks - 1) * step + width]
        span.unfold(1, width, step).mT.add_(new[:, :, start : start + width])


def _tile_mask(tile: Tile, queries: Tensor) -> Tensor | None:
    """The mask, repeated for the query heads of a key-value head."""
    mask = tile.mask
    if mask is None or mask.shape[2] in (1, queries.shape[2]):
        return mask
    return mask.repeat(1, 1, queries.shape[2] // mask.shape[2], 1)


def _attend_tile(query: Tensor, key: Tensor, value: Tensor, tile: Tile, wide: _Wide) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention of (Z, h, n, W), the largest score and `sum e^(score - largest)`, (Z, h, n, 1).

    The fused kernel gives only the logarithm of the sum of e^score, which takes the place of the largest score; the sum is then
    1. Rows that see no key have `MASKED` and 0.
    """
    mask = _tile_mask(tile, query)
    if wide.is_fused and _has_fused_kernel(query, key):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, tile.is_causal, attn_mask=mask, scale=wide.scale
        )
        top = lse.unsqueeze(-1)
        empty = _empty_rows(mask, key[..., -1] if wide.has_bias else None, tile)
        if empty is None:
            return out, top, torch.ones_like(top)
        empty = empty.unsqueeze(-1)
        return out.masked_fill(empty, 0), top.masked_fill(empty, MASKED), torch.ones_like(top).masked_fill(empty, 0)
    scores = _scores(query, key, mask, tile, wide)
    top = scores.amax(-1, keepdim=True) if key.shape[2] else query.new_full((*query.shape[:3], 1), MASKED)
    weights = (scores - top.masked_fill(top == MASKED, 0)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ value / total.masked_fill(total == 0, 1), top, total


def _empty_rows(mask: Tensor | None, bias: Tensor | None, tile: Tile) -> Tensor | None:
    """The rows (Z or 1, h or 1, n or 1) of a tile that see no key; None if there is none. `bias` is (Z, h, columns).

    The fused kernel gives them a log-sum-exp of 0, which is also that of a single key whose score is 0.
    """
    if bias is None:
        return None if mask is None else mask.amax(-1) == MASKED
    allowed = bias.exp()  # 1 or 0
    if mask is None:
        seen = allowed.cumsum(-1) if tile.is_causal else allowed.sum(-1, keepdim=True)
    else:
        seen = torch.einsum("zhnc,zhc->zhn", mask.exp(), allowed)
    return seen == 0


def _tile_gradients(
    query: Tensor, key: Tensor, value: Tensor, results: Sequence[Tensor], tile: Tile, wide: _Wide
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from the output's gradient and the output, top and total over all keys together."""
    (grad, out, top, total), mask = results, _tile_mask(tile, query)
    if wide.is_fused and _has_fused_kernel(query, key):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, (top + total.log()).squeeze(-1), 0.0, tile.is_causal, attn_mask=mask, scale=wide.scale
        )
    weights = (_scores(query, key, mask, tile, wide) - top).exp() / total
    inner = grad @ value.mT - (grad * out).sum(-1, keepdim=True)
    scores = weights * inner * wide.scale
    return scores @ key, scores.mT @ query, weights.mT @ grad


def _has_fused_kernel(query: Tensor, key: Tensor) -> bool:
    """Whether PyTorch has a fused kernel for these that returns the log-sum-exp as well."""
    return query.device.type == "cpu" and query.numel() > 0 and key.numel() > 0


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, tile: Tile, wide: _Wide) -> Tensor:
    channels = slice(-1 if wide.has_bias else None)
    scores = query[..., channels] * wide.scale @ key[..., channels].mT
    if wide.has_bias:
        scores = scores.masked_fill(key[..., None, :, -1] == MASKED, MASKED)
    if mask is not None:
        scores = scores.masked_fill(mask == MASKED, MASKED)
    if tile.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, MASKED)
    return scores
