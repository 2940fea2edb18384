"""The tiles' compiled loops, called from PyTorch: tiles.cpp has what they do."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.block_sparse.plan import Part, Plan, Tile, slots, unpack
from subquad.ops import native_call
from subquad.ops.double_backward import forbid_double_backward
from subquad.ops.hugepages import advise_huge_pages

_LANES = 16  # numbers in the widest vector
_SPAN = ("start", "rows", "count", "first", "step", "columns", "is_causal")
_MASK = ("mask_sequence", "mask_block", "mask_key", "mask_is_wide")
_Tile = native_call.structure("Tile", (*_SPAN, *_MASK, "runs", "runs_row"), (), (), ("mask", "run_start"))
_SIZES = ("sequences", "subsequences", "groups", "queries", "keys")
_STRIDES = ("query_group", "d_query_group", "bias_sequence", "place_row")
_VIEWS = ("query", "key", "value", "d_query", "d_key", "d_value")
_Part = native_call.structure("Part", (*_SIZES, *_STRIDES, "tiles"), (), _VIEWS, ("bias", "place", "tile"))
_WHOLE = ("parts", "length", "channels", "value_channels", "threads")
_Call = native_call.structure("Call", _WHOLE, ("scale",), (), ("part", "out", "top", "lse", "grad"))


def attend(plan: Plan, tensors: Sequence[Tensor | None], length: int, scale: float) -> tuple[Tensor, Tensor]:
    """As the engine's own `attend`, of packed parts."""
    out, lse = _Tiles.apply(plan, length, scale, *tensors)  # type: ignore[no-untyped-call]
    return out, lse.isinf()


class _Tiles(torch.autograd.Function):
    """The output (R, N, E) and the log-sum-exp of its scores (R, N), infinite where no key was met."""

    @staticmethod
    def forward(plan: Plan, length: int, scale: float, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        parts = _prepared(plan, tensors)
        query, value = parts[0].query, parts[0].value
        out = advise_huge_pages(query.new_empty(query.shape[0] * query.shape[2], length, value.shape[-1]))
        lse, top = out.new_empty(out.shape[:2]), out.new_empty(out.shape[:2])
        _run("tiles_forward", parts, [{} for _ in parts], scale, {"out": out, "top": top, "lse": lse})
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.plan, _, ctx.scale, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        parts = _prepared(ctx.plan, tensors)
        grads = []
        for part in parts:
            query, key, value = (advise_huge_pages(torch.empty_like(x)) for x in (part.query, part.key, part.value))
            grads.append({"d_query": query, "d_key": key.zero_(), "d_value": value.zero_()})
        _run("tiles_backward", parts, grads, ctx.scale, {"out": out, "lse": lse, "grad": grad.contiguous()})
        return (
            None,
            None,
            None,
            *slots(ctx.plan, forbid_double_backward([g for found in grads for g in found.values()], [grad, *tensors])),
        )


def _prepared(plan: Plan, tensors: Sequence[Tensor | None]) -> list[Part]:
    """Channels side by side, masks transposed to (Z S or 1, count or 1, columns, rows or 1)."""
    found = []
    for part in unpack(plan, tensors):
        query, key, value = (native_call.as_rows(x) for x in (part.query, part.key, part.value))
        place, bias = (None if x is None else x.contiguous() for x in (part.place, part.bias))
        found.append(Part(query, key, value, [_prepared_tile(tile) for tile in part.tiles], place, bias))
    return found


def _prepared_tile(tile: Tile) -> Tile:
    mask = tile.mask
    if mask is not None:
        rows = mask.shape[2]
        mask = F.pad(mask.mT, (0, -rows % _LANES if rows > 1 else 0)).contiguous()
    return replace(tile, mask=mask, runs=None if tile.runs is None else tile.runs.contiguous())


def _run(
    function: str,
    parts: Sequence[Part],
    grads: Sequence[Mapping[str, Tensor]],
    scale: float,
    tensors: Mapping[str, Tensor],
) -> None:
    tiles = [(_Tile * len(part.tiles))(*map(_tile, part.tiles)) for part in parts]
    array = (_Part * len(parts))(*map(_part, parts, grads, tiles))
    out = tensors["out"]
    sizes = (len(parts), out.shape[1], parts[0].query.shape[-1], out.shape[2])
    numbers = {**dict(zip(_WHOLE, sizes, strict=False)), "scale": scale, "part": ctypes.addressof(array)}
    pairs = sum(t.count * t.rows * t.columns * p.query.shape[:3].numel() for p in parts for t in p.tiles)
    native_call.call(function, _Call, numbers, {}, tensors, pairs * 2 * out.shape[2])


def _part(part: Part, grads: Mapping[str, Tensor], tiles: Any) -> Any:
    sizes = (*part.query.shape[:4], part.key.shape[2])
    found = _Part(**dict(zip(_SIZES, sizes, strict=True)), tiles=len(tiles), tile=ctypes.addressof(tiles))
    for name, x in {"query": part.query, "key": part.key, "value": part.value, **grads}.items():
        if x.dim() == 5:
            setattr(found, f"{name}_group", x.stride(2))
            x = x[:, :, 0]
        setattr(found, name, native_call.View(x.data_ptr(), *x.stride()[:3]))
    if part.bias is not None:
        found.bias, found.bias_sequence = part.bias.data_ptr(), _stride(part.bias, 0)
    if part.place is not None:
        found.place, found.place_row = part.place.data_ptr(), _stride(part.place, 0)
    return found


def _tile(tile: Tile) -> Any:
    found = _Tile(**{name: getattr(tile, name) for name in _SPAN})
    if tile.mask is not None:
        found.mask, found.mask_is_wide = tile.mask.data_ptr(), tile.mask.shape[3] > 1
        found.mask_sequence, found.mask_block, found.mask_key = (_stride(tile.mask, dim) for dim in range(3))
    if tile.runs is not None:
        found.run_start, found.runs, found.runs_row = tile.runs.data_ptr(), tile.runs.shape[-1], _stride(tile.runs, 0)
    return found


def _stride(x: Tensor, dim: int) -> int:
    """0 where there is one for all."""
    return 0 if x.shape[dim] == 1 else x.stride(dim)
