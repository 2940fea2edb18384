"""A loss over a vocabulary, computed for some tokens at a time, so that the logits of all tokens are never in memory at once.

They would be by far the largest tensors of finetuning, R tokens by V words. The gradient of each chunk is computed together
with its loss, and its logits are dropped; only the gradient of the states, (R, dim), is kept. With q = softmax(logits), the
gradients in the logits are written out, which costs a fraction of automatic ones:

    cross entropy    -log q[w]      q - 1[w]     of the word w
    divergence       KL(p || q)     q - p        from a distribution p
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CHUNK = 2**22  # logits at a time: few enough to stay in cache, and enough not to read the head too often

Head = Callable[[Tensor], Tensor]  # states (r, dim) to logits (r, V)
Loss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]  # logits (r, V) of these rows to the summed loss and its gradient


def cross_entropy(words: Tensor) -> Loss:
    """The loss for the next words (R,)."""

    def loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        index = words[rows].unsqueeze(-1)
        log_q = logits.log_softmax(-1)
        found = -log_q.gather(-1, index).sum()
        return found, log_q.exp_().scatter_add_(-1, index, log_q.new_full(index.shape, -1.0))

    return loss


def divergence(states: Tensor, head: Head) -> Loss:
    """The loss for the distributions that the head predicts from other states (R, dim)."""

    def loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_p, log_q = head(states[rows]).float().log_softmax(-1), logits.log_softmax(-1)
        p = log_p.exp()
        found = torch.linalg.vecdot(p, log_p.sub_(log_q)).sum()
        return found, log_q.exp_().sub_(p)

    return loss


def mean_loss(states: Tensor, head: Head, words: int, loss: Loss) -> Tensor:
    """The mean loss over states (R, dim), for a head of `words` words. Only `states` get a gradient."""
    total: Tensor = _Sum.apply(states, head, max(1, _CHUNK // words), loss)  # type: ignore[no-untyped-call]
    return total / len(states)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Head, size: int, loss: Loss) -> Tensor:
        total = states.new_zeros((), dtype=torch.float32)
        grads: list[Tensor] = []
        for start in range(0, len(states), size):
            rows = slice(start, start + size)
            with torch.set_grad_enabled(ctx.needs_input_grad[0]):
                part = states[rows].detach().requires_grad_(ctx.needs_input_grad[0])
                logits = head(part)
            found, slope = loss(logits.detach().float(), rows)
            grads += torch.autograd.grad(logits, part, slope.to(logits.dtype)) if part.requires_grad else []
            total += found
        ctx.save_for_backward(*([torch.cat(grads)] if grads else []))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        [states] = ctx.saved_tensors
        return grad * states, None, None, None
