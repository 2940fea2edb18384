"""A loss over a vocabulary, some tokens at a time: the logits of all tokens are never there at once.

They would be by far the largest tensors of a finetuning, R tokens by V words. The gradient of each piece is taken as soon as
its loss is known, and its logits go; what is kept is the gradient of the states alone, (R, dim).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PIECE = 2**22  # logits at a time: so few that they stay in cache, so many that the head is not read too often

Loss = Callable[[Tensor, slice], Tensor]  # of some of the states, and which they are: the sum over them


def mean_loss(states: Tensor, words: int, loss: Loss) -> Tensor:
    """The mean over the tokens of states (R, dim) for logits of so many words; into nothing else gradients are taken."""
    total: Tensor = _Sum.apply(states, max(1, _PIECE // words), loss)  # type: ignore[no-untyped-call]
    return total / len(states)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, size: int, loss: Loss) -> Tensor:
        total = states.new_zeros((), dtype=torch.float32)
        grads: list[Tensor] = []
        for start in range(0, len(states), size):
            rows = slice(start, start + size)
            with torch.set_grad_enabled(ctx.needs_input_grad[0]):
                part = states[rows].detach().requires_grad_(ctx.needs_input_grad[0])
                found = loss(part, rows)
                grads += torch.autograd.grad(found, part) if part.requires_grad else []
            total += found.detach()
        ctx.save_for_backward(*([torch.cat(grads)] if grads else []))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        [states] = ctx.saved_tensors
        return grad * states, None, None
