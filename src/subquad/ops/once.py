"""Gradients that cannot be differentiated again: asking for it is refused, wherever in the graph it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.errors import UnsupportedError


def once(grads: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """`grads`, which depend on `inputs`: where a graph is recorded, going back through them raises an error."""
    if not torch.is_grad_enabled():
        return tuple(grads)
    return _Once.apply(len(grads), *grads, *inputs)  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(t.clone() for t in tensors[:count] if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        raise UnsupportedError(
            "this mechanism has first derivatives only; got a request for second ones (create_graph=True, and then a gradient "
            "of the gradient). The kernelized mechanisms have them."
        )
