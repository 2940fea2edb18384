"""Exact softmax over sets of keys that are given as parts: the kernel of the sparse engines.

Softmax over a disjoint union is the softmaxes over its parts, weighed by their log-sum-exp:

    o = sum_p e^(l_p - l) o_p,    l = log sum_p e^(l_p)

Compiled loops let all parts of a query meet in one softmax. Without them, PyTorch's kernel takes the parts one by one: keys are
read through overlapping views, never copied for a tile, and the backward pass recomputes the weights of each part from `l` and
the merged output (Dao et al., 2022, arXiv:2205.14135), so memory stays linear.

Z sequences, S subsequences of each, G queries a group, n queries, m keys, W channels; R = Z G rows of output, N queries each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.block_sparse.plan import BARRED, NOTHING, Part, Tile, barred_unless, pack, slots, unpack
from subquad.ops import dispatch
from subquad.ops import tiles as compiled
from subquad.ops.double_backward import forbid_double_backward
from subquad.ops.hugepages import advise_huge_pages
from subquad.ops.precision import needs_gradient

_PIECE = 2**20  # numbers of the output that are worked on at a time


def attend(parts: Sequence[Part], length: int, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax over all that the parts show: the output (R, N, E), and which of its rows met no key (R, N)."""
    plan, tensors = pack(parts)
    if dispatch.can_use_compiled(*tensors):
        return compiled.attend(plan, tensors, length, scale)
    width = parts[0].value.shape[-1]
    parts = [_gathered(part) for part in parts]
    has_bias = any(part.bias is not None for part in parts)
    if has_bias or scale <= 0:  # the kernel would scale what is barred, or bar the future before it scales
        parts, scale = [replace(part, query=part.query * scale) for part in parts], 1.0
    plan, tensors = pack([_of_one_width(part, has_bias) for part in parts])
    # torch.compile takes a Function with setup_context only where a gradient is recorded.
    run = _Merged.forward if torch.compiler.is_compiling() and not needs_gradient(*tensors) else _Merged.apply
    out, empty, _ = run(plan, length, scale, *tensors)
    return out[..., :width], empty


def _gathered(part: Part) -> Part:
    """Where tiles have `runs`: their keys, copied side by side, (R, 1, ...)."""
    if all(tile.runs is None for tile in part.tiles):
        return part
    (sequences, _, groups, queries, _), keys = part.query.shape, part.key.shape[2]
    rows, tiles, index, first = sequences * groups, [], [], 0
    for tile in part.tiles:
        assert tile.runs is not None
        size = tile.columns // tile.runs.shape[-1]
        position = tile.runs.unsqueeze(-1) + torch.arange(size, device=tile.runs.device)
        position = torch.where((tile.runs.unsqueeze(-1) >= 0) & (position < keys), position, keys)
        index.append(position.flatten(1).expand(rows, -1))
        tiles.append(replace(tile, first=first, step=tile.columns, runs=None))
        first += tile.count * tile.columns
    place = torch.cat(index, dim=1)  # (R, all columns), m for none
    start = torch.arange(sequences, device=place.device).repeat_interleave(groups)[:, None]
    flat = (place.clamp(max=keys - 1) + start * keys).flatten()
    key, value = (x.flatten(0, 2).index_select(0, flat).view(rows, 1, -1, x.shape[-1]) for x in (part.key, part.value))
    bias = barred_unless(place < keys, key.dtype)
    if part.bias is not None:
        bias = bias + part.bias.expand(sequences, -1, -1).flatten().index_select(0, flat).view_as(bias)
    query = part.query.reshape(rows, 1, 1, queries, -1)
    return Part(query, key, value, tiles, part.place, bias.unsqueeze(1))


def _of_one_width(part: Part, has_bias: bool) -> Part:
    """As PyTorch's kernel takes them. A bias becomes the last channel of the keys, which meets a 1 in the queries."""
    query, key, value = part.query, part.key, part.value
    width = max(query.shape[-1] + has_bias, value.shape[-1])
    if has_bias:
        bias = key.new_zeros(()) if part.bias is None else part.bias.unsqueeze(-1)
        query, key = _with_last(query, query.new_ones(()), width), _with_last(key, bias, width)
    query, key, value = (_side_by_side(pad_to(x, width, -1)) for x in (query, key, value))
    return replace(part, query=query, key=key, value=value, bias=None)


def _side_by_side(x: Tensor) -> Tensor:
    """With its channels next to each other, which the kernel takes for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_last(x: Tensor, last: Tensor, width: int) -> Tensor:
    """x (..., D), zeros, and `last` as the last of `width` channels."""
    return torch.cat([pad_to(x, width - 1, -1), last.expand(*x.shape[:-1], 1)], dim=-1)


def pad_to(x: Tensor, size: int, dim: int) -> Tensor:
    """x, with zeros behind it to make dimension -1 or -2 as large as `size`; F.pad would copy it even for none."""
    missing = size - x.shape[dim]
    return F.pad(x, (0, 0) * (-1 - dim) + (0, missing)) if missing else x


class _Merged(torch.autograd.Function):
    """The output (R, N, W), which of its rows met no key, and its log-sum-exp, both (R, N)."""

    @staticmethod
    def forward(plan: Any, length: int, scale: float, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        parts = unpack(plan, tensors)
        query = parts[0].query
        out = advise_huge_pages(query.new_empty(query.shape[0] * query.shape[2], length, query.shape[-1]))
        lse = out.new_empty(out.shape[:2])
        empty = out.new_empty(out.shape[:2], dtype=torch.bool)
        for start, end in _pieces(out, parts):
            some = [_some(part, start, end) for part in parts]
            results = [_forward_part(part, scale) for part in some]
            o, level = _merge(results, [part.place for part in some], length)
            none = level < NOTHING
            out[start:end] = o.masked_fill_(none.unsqueeze(-1), 0)
            lse[start:end] = level.masked_fill_(none, 0)  # so that e^(score - lse) of a barred pair is 0
            empty[start:end] = none
        return out, empty, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.plan, _, ctx.scale, *tensors = inputs
        out, empty, lse = output
        ctx.mark_non_differentiable(empty, lse)
        ctx.save_for_backward(out, lse, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        with torch.no_grad():
            grads = _gradients(unpack(ctx.plan, tensors), grad, out, lse, ctx.scale)
        return None, None, None, *slots(ctx.plan, forbid_double_backward(grads, [grad, *tensors]))


def _gradients(parts: Sequence[Part], grad: Tensor, out: Tensor, lse: Tensor, scale: float) -> list[Tensor]:
    """Those of query, key and value of each part."""
    grads = [[x.new_zeros(x.shape) for x in (part.query, part.key, part.value)] for part in parts]  # contiguous
    for start, end in _pieces(out, parts):
        for part, totals in zip(parts, grads, strict=True):
            some, place = _some(part, start, end), slice(start // part.groups, end // part.groups)
            results = [t[start:end] if some.place is None else _take(t[start:end], some.place) for t in (grad, out, lse)]
            _backward_part(some, results, [total[place] for total in totals], scale)
    return list(itertools.chain.from_iterable(grads))


def _pieces(out: Tensor, parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Rows of the output to work on at a time: so few that they stay in cache, enough for every thread."""
    rows, unit = out.shape[0], max(part.groups for part in parts)
    if torch.compiler.is_compiling():
        return [(0, rows)]
    step = max(_PIECE // max(out[0].numel() if rows else 1, 1), torch.get_num_threads())
    step = -(-step // unit) * unit
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _some(part: Part, start: int, end: int) -> Part:
    """What concerns the rows `start` to `end` of the output."""
    sequences, first, last = part.query.shape[0], start // part.groups, end // part.groups
    if last - first == sequences:
        return part

    def cut(x: Tensor | None, each: int) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 else x[first * each : last * each]

    tiles = [replace(tile, mask=cut(tile.mask, part.query.shape[1])) for tile in part.tiles]
    query, key, value = (x[first:last] for x in (part.query, part.key, part.value))
    return Part(query, key, value, tiles, cut(part.place, part.groups))


def _split(tile: Tile, part: Part) -> list[Tile]:
    """Fewer blocks at a time, where the gradients of all their keys would not stay in cache."""
    if torch.compiler.is_compiling() or tile.count == 1:
        return [tile]
    sequences, subsequences, _, width = part.key.shape
    count = max(_PIECE // max(sequences * subsequences * tile.columns * width, 1), 1)

    def some(first: int) -> Tile:
        number = min(count, tile.count - first)
        mask = tile.mask if tile.mask is None or tile.mask.shape[1] == 1 else tile.mask[:, first : first + number]
        start, key = tile.start + first * tile.rows, tile.first + first * tile.step
        return replace(tile, start=start, count=number, first=key, mask=mask)

    return [some(first) for first in range(0, tile.count, count)]


def _forward_part(part: Part, scale: float) -> tuple[Tensor, Tensor]:
    """(R, S n, W) and its log-sum-exp (R, S n)."""
    query = part.query
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:-1])
    for tile in part.tiles:
        key, value = (_keys(x, tile) for x in (part.key, part.value))
        found, level = _kernel(_queries(query, tile), _spread(key, tile, query), _spread(value, tile, query), tile, scale)
        rows = slice(tile.start, tile.start + tile.count * tile.rows)
        out[:, :, :, rows] = _restore(found, tile, query)
        lse[:, :, :, rows] = _restore(level.unsqueeze(-1), tile, query).squeeze(-1)
    return _rows(out), _rows(lse.unsqueeze(-1)).squeeze(-1)


def _backward_part(part: Part, results: Sequence[Tensor], grads: Sequence[Tensor], scale: float) -> None:
    """Add to the gradients of query, key and value; `results` are (R, S n, ...): the output's gradient, output, log-sum-exp."""
    query = part.query
    grad, out, lse = (_unrows(x if x.dim() == 3 else x.unsqueeze(-1), query) for x in results)
    for tile in itertools.chain.from_iterable(_split(tile, part) for tile in part.tiles):
        key, value = (_spread(_keys(x, tile), tile, query) for x in (part.key, part.value))
        rows_of = [_queries(x, tile) for x in (grad, query, out, lse)]
        found = _kernel_backward(rows_of[0], rows_of[1], key, value, rows_of[2], rows_of[3].squeeze(-1), tile, scale)
        rows = slice(tile.start, tile.start + tile.count * tile.rows)
        grads[0][:, :, :, rows] = _restore(found[0], tile, query)
        for total, new in zip(grads[1:], found[1:], strict=True):
            _add_keys(total.flatten(0, 1), new, tile)


def _merge(results: Sequence[tuple[Tensor, Tensor]], places: Sequence[Tensor | None], length: int) -> tuple[Tensor, Tensor]:
    if len(results) == 1 and places[0] is None:
        return results[0]
    largest = torch.stack([_put(lse, place, length, "amax") for (_, lse), place in zip(results, places, strict=True)]).amax(0)
    total, out = torch.zeros_like(largest), torch.zeros_like(results[0][0][:, :1]).repeat(1, length, 1)
    for (o, lse), place in zip(results, places, strict=True):
        weight = (lse - (largest if place is None else _take(largest, place))).exp()
        total += _put(weight, place, length, "sum")
        out += _put(o * weight.unsqueeze(-1), place, length, "sum")
    return out.div_(total.unsqueeze(-1)), largest + total.log()


def _put(x: Tensor, place: Tensor | None, length: int, reduce: str) -> Tensor:
    """x (R, n, ...) at rows `place` of (R, N, ...): summed, or the largest, where several meet."""
    if place is None:
        return x
    index = _like(place, x)
    room = x.new_full((x.shape[0], length + 1, *x.shape[2:]), BARRED if reduce == "amax" else 0.0)
    return room.scatter_reduce_(1, index, x, reduce).narrow(1, 0, length)


def _take(x: Tensor, place: Tensor) -> Tensor:
    """The rows `place` of x (R, N, ...), 0 for row N."""
    room = F.pad(x, (0, 0) * (x.dim() - 2) + (0, 1))
    return room.gather(1, _like(place, x))


def _like(place: Tensor, x: Tensor) -> Tensor:
    place = place.expand(x.shape[0], -1)
    return place if x.dim() == 2 else place.unsqueeze(-1).expand(-1, -1, x.shape[2])


def _rows(x: Tensor) -> Tensor:
    """(Z, S, G, n, W) -> (Z G, S n, W)."""
    return x.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _unrows(x: Tensor, query: Tensor) -> Tensor:
    """(Z G, S n, W) -> (Z, S, G, n, W)."""
    sequences, subsequences, groups, queries, _ = query.shape
    return x.reshape(sequences, groups, subsequences, queries, x.shape[-1]).transpose(1, 2)


def _queries(x: Tensor, tile: Tile) -> Tensor:
    """The tile's rows of x (Z, S, G, n, W): (Z S, G, rows, W) for a single block, otherwise (Z S, count, G rows, W)."""
    x = x[:, :, :, tile.start : tile.start + tile.count * tile.rows].flatten(0, 1)
    if tile.count == 1:
        return x
    return x.unflatten(2, (tile.count, tile.rows)).transpose(1, 2).flatten(2, 3)


def _restore(x: Tensor, tile: Tile, query: Tensor) -> Tensor:
    """What `_queries` did, undone: (Z, S, G, count rows, W)."""
    if tile.count > 1:
        x = x.unflatten(2, (-1, tile.rows)).transpose(1, 2).flatten(2, 3)
    return x.unflatten(0, query.shape[:2])


def _keys(x: Tensor, tile: Tile) -> Tensor:
    """The tile's keys of x (Z, S, m, W): (Z S, count, columns, W), as overlapping views."""
    x = x.flatten(0, 1)[:, tile.first : tile.first + (tile.count - 1) * tile.step + tile.columns]
    if tile.step == 0 or tile.count == 1:
        return x.unsqueeze(1).expand(-1, tile.count, -1, -1)
    return x.unfold(1, tile.columns, tile.step).mT


def _spread(x: Tensor, tile: Tile, query: Tensor) -> Tensor:
    """One block's keys for every query of a group."""
    return x.expand(-1, query.shape[2], -1, -1) if tile.count == 1 else x


def _add_keys(total: Tensor, new: Tensor, tile: Tile) -> None:
    """Add new (Z S, count, columns, W), or a single block's (Z S, G, columns, W), to the keys of total (Z S, m, W)."""
    if tile.step == 0 or tile.count == 1:
        total[:, tile.first : tile.first + tile.columns] += new.sum(1)
        return
    for start in range(0, tile.columns, tile.step):
        width = min(tile.step, tile.columns - start)
        first = tile.first + start
        span = total[:, first : first + (tile.count - 1) * tile.step + width]
        span.unfold(1, width, tile.step).mT.add_(new[:, :, start : start + width])


def _tile_mask(tile: Tile, queries: Tensor) -> Tensor | None:
    """The mask, repeated for the queries of a group."""
    mask = tile.mask
    if mask is None or mask.shape[2] in (1, queries.shape[2]):
        return mask
    return mask.repeat(1, 1, queries.shape[2] // mask.shape[2], 1)


def _kernel(query: Tensor, key: Tensor, value: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of (Z, h, n, W) and its log-sum-exp (Z, h, n)."""
    mask = _tile_mask(tile, query)
    if _is_fused(query, key):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, tile.is_causal, attn_mask=mask, scale=scale
        )
    scores = _scores(query, key, mask, tile, scale)
    lse = scores.logsumexp(-1) if key.shape[2] else query.new_full(query.shape[:3], BARRED)
    return (scores - lse.unsqueeze(-1)).exp() @ value, lse


def _kernel_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, where `out` and `lse` are those of all keys together."""
    mask = _tile_mask(tile, query)
    if _is_fused(query, key):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, tile.is_causal, attn_mask=mask, scale=scale
        )
    weights = (_scores(query, key, mask, tile, scale) - lse.unsqueeze(-1)).exp()
    inner = grad @ value.mT - (grad * out).sum(-1, keepdim=True)
    scores = weights * inner * scale
    return scores @ key, scores.mT @ query, weights.mT @ grad


def _is_fused(query: Tensor, key: Tensor) -> bool:
    """Whether PyTorch has a kernel that gives the log-sum-exp too, for these."""
    return query.device.type == "cpu" and query.numel() > 0 and key.numel() > 0


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, tile: Tile, scale: float) -> Tensor:
    scores = query @ key.mT * scale
    if mask is not None:
        scores = scores + mask
    if tile.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, BARRED)
    return scores
