"""Gradients of gradients, for operators whose backward pass is a compiled kernel: recomputed by PyTorch, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.errors import UnsupportedError

FIRST_DERIVATIVES_ONLY = (
    "this mechanism has first derivatives only; got a request for second derivatives (create_graph=True, then a gradient of "
    "the gradient). Use a kernelized mechanism, which has them."
)


def recomputed_gradients(
    forward: Callable[[], Tensor], inputs: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Differentiable gradients of `forward()` with respect to `inputs`, None where not `needed`.

    `forward` computes the output again with PyTorch operations; `grad` is the gradient of that output.
    """
    wanted = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(forward().to(grad.dtype), wanted, grad, create_graph=True, materialize_grads=True))
    return [next(found) if is_needed else None for is_needed in needed]


def second_gradients(
    forward: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, grads: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients for the arguments of an operator (grad, *inputs, ...) that returns the gradients of `forward(*inputs)`.

    `grads` are those of its results. Everything is computed again, by autograd. `needed` says which arguments need a gradient;
    those after the inputs get None.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        tensors = [x if x.requires_grad else x.detach().requires_grad_() for x in (grad, *inputs)]
        out = forward(*tensors[1:])
        first = torch.autograd.grad(out, tensors[1:], tensors[0].to(out.dtype), create_graph=True, materialize_grads=True)
        recorded = [(x, g) for x, g in zip(first, grads, strict=True) if x.requires_grad]
        found = torch.autograd.grad(
            [x for x, _ in recorded],
            tensors,
            [g.to(x.dtype) for x, g in recorded],
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )
    rest = [None] * (len(needed) - len(found))
    return *(g if is_needed else None for g, is_needed in zip(found, needed, strict=False)), *rest


def forbid_double_backward(grads: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """`grads`, which depend on `inputs`; differentiating them raises an error."""
    if not torch.is_grad_enabled():
        return tuple(grads)
    return _ForbidDoubleBackward.apply(len(grads), *grads, *inputs)  # type: ignore[no-untyped-call]


class _ForbidDoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(t.clone() for t in tensors[:count] if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        raise UnsupportedError(FIRST_DERIVATIVES_ONLY)
