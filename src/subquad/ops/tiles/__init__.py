"""Exact softmax attention over tile groups (`group`): the compiled kernel (`native`), or PyTorch (`pytorch`, `one_tile`).

Z sequences, G query heads per key-value head; R = Z G rows of output, N queries each, E value channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.ops.dispatch import can_use_compiled
from subquad.ops.double_backward import forbid_double_backward
from subquad.ops.precision import needs_gradient
from subquad.ops.tiles import native, pytorch
from subquad.ops.tiles.group import MASKED, Tile, TileGroup, additive_mask, differentiable

__all__ = ["MASKED", "Tile", "TileGroup", "additive_mask", "attend", "backward", "differentiable", "forward"]


def forward(groups: Sequence[TileGroup], length: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The output (R, N, E), the largest score of each row and `sum e^(score - largest)`, (R, N); both are 0 for empty rows.

    No gradients are recorded. PyTorch may return the log-sum-exp as the largest score, and 1 as the sum.
    """
    return (native if _is_native(groups) else pytorch).forward(groups, length, scale)


def backward(grad: Tensor, groups: Sequence[TileGroup], out: Tensor, top: Tensor, total: Tensor, scale: float) -> list[Tensor]:
    """The gradients of `differentiable(groups)`, from that of the output and what `forward` returned."""
    return (native if _is_native(groups) else pytorch).backward(grad, groups, out, top, total, scale)


def attend(groups: Sequence[TileGroup], length: int, scale: float) -> tuple[Tensor, Tensor]:
    """The output (R, N, E), and which of its rows are empty (R, N); gradients are recorded."""
    inputs = differentiable(groups)
    run = _TileSoftmax.apply if needs_gradient(*inputs) else _TileSoftmax.forward
    out, _, total = run(groups, length, scale, *inputs)
    return out, total == 0


def _is_native(groups: Sequence[TileGroup]) -> bool:
    return can_use_compiled(*differentiable(groups), *(t for group in groups for t in group.constants))


class _TileSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(groups: Sequence[TileGroup], length: int, scale: float, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`_` is `differentiable(groups)`, which autograd must get as arguments of their own."""
        return forward(groups, length, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        groups, _, ctx.scale, *_ = inputs
        ctx.mark_non_differentiable(*output[1:])
        # All tensors are saved where hooks, such as those of activation checkpointing, reach them.
        ctx.tiles = [[tile._replace(mask=None, run_starts=None) for tile in group.tiles] for group in groups]
        ctx.save_for_backward(*output, *differentiable(groups), *(t for group in groups for t in group.constants))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        out, top, total, *saved = ctx.saved_tensors
        constants = iter(saved[3 * len(ctx.tiles) :])
        groups = []
        for number, tiles in enumerate(ctx.tiles):
            own = [next(constants) for _ in TileGroup._fields[4:]]
            filled = [tile._replace(mask=next(constants), run_starts=next(constants)) for tile in tiles]
            query, key, value = saved[3 * number : 3 * number + 3]
            groups.append(TileGroup(query, key, value, filled, *own))
        with torch.no_grad():
            grads = backward(grad, groups, out, top, total, ctx.scale)
        return None, None, None, *forbid_double_backward(grads, [grad, *saved])
