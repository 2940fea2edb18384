"""Buffers that training moves, as a forward pass that is run again must meet them.

Activation checkpointing repeats a forward pass inside the backward pass. A mechanism whose buffers move in training would then
compute something else, and gradients of it; so each pass leaves behind the buffers that it met, and its repetition takes them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.errors import UnsupportedError

Buffers = dict[str, Tensor]
MOST = 64  # forward passes before one backward pass


def is_recomputing() -> bool:
    """Whether a backward pass is running this forward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@dataclass
class _Pass:
    fingerprint: Tensor
    buffers: Buffers
    is_recalled: bool = False


class Met:
    """The buffers that the last forward passes in training met, found again by their queries."""

    def __init__(self) -> None:
        self._passes: deque[_Pass] = deque(maxlen=MOST)
        self._is_over = False  # a backward pass has begun, so that the next forward pass is of another one

    def remember(self, query: Tensor, buffers: Buffers) -> None:
        if self._is_over:
            self._passes.clear()
            self._is_over = False
        self._passes.append(_Pass(_fingerprint(query), {name: buffer.clone() for name, buffer in buffers.items()}))

    def recall(self, query: Tensor) -> Buffers:
        """What the pass with these queries met."""
        self._is_over = True
        mark = _fingerprint(query)
        alike = [p for p in self._passes if torch.allclose(p.fingerprint, mark, rtol=1e-5, atol=0.0, equal_nan=True)]
        if not alike:
            raise UnsupportedError(
                "a forward pass is run again, as by activation checkpointing, whose queries none of the last "
                f"{MOST} passes in training had, so that it is unknown which buffers it met. Run the backward pass sooner."
            )
        # Of passes with the same queries the last is run again first.
        found = next((p for p in reversed(alike) if not p.is_recalled), alike[-1])
        found.is_recalled = True
        return found.buffers


def _fingerprint(query: Tensor) -> Tensor:
    """Two sums over the queries, in float64 where the device has it; alike for the same queries only."""
    wide = query.detach().to(torch.float32 if query.device.type == "mps" else torch.float64)
    return torch.stack([wide.square().sum(), wide.abs().sum()])
