"""Gradients that have gradients, for what compiled loops computed: computed again by PyTorch, under its autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def again(run: Callable[[], Tensor], inputs: Sequence[Tensor], needed: Sequence[bool], grad: Tensor) -> list[Tensor | None]:
    """The gradients of those of the `inputs` that are `needed`, from that of what `run` gives."""
    wanted = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(run().to(grad.dtype), wanted, grad, create_graph=True, materialize_grads=True))
    return [next(found) if is_needed else None for is_needed in needed]
