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


def gradients_of_gradients(
    forward: Callable[..., Tensor], grad: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of `grad` and `inputs`, from those of the gradients of `inputs`.

    `forward` computes the output from `inputs` again with PyTorch operations; `grad` is the gradient of that output, `grads`
    those of what a backward pass returned.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that inputs that depend on each other, or are one tensor, get gradients of their own.
        grad, *inputs = (x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in (grad, *inputs))
        out = forward(*inputs)
        first = torch.autograd.grad(out, inputs, grad.to(out.dtype), create_graph=True, materialize_grads=True)
        recorded = [(x, g) for x, g in zip(first, grads, strict=True) if x.requires_grad]
        return torch.autograd.grad(
            [x for x, _ in recorded],
            [grad, *inputs],
            [g.to(x.dtype) for x, g in recorded],
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )


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
