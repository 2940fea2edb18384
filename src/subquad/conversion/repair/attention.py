"""Attention transfer: the new maps learn to give what softmax gave, layer by layer, without labels.

Each converted site's mechanism reads the queries, keys and values that the original model has there, and learns to give the
original's output:

    L = mean over sites and heads of  |o' - o|^2 / |o|^2

Nothing else is learnt, and no layer waits for another. The first stage of LoLCATs (Zhang et al., 2024), there without the
denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.conversion.activations import Batch, run
from subquad.conversion.diagnosis import head_errors
from subquad.conversion.repair.loop import Stage
from subquad.conversion.swap import every_mechanism, mechanisms
from subquad.errors import UnsupportedError

_TINY = 1e-9


class Transfer(Stage):
    """Of `converted`, by `original` made watchable."""

    name, lr = "transfer", 1e-2

    def __init__(self, original: PreTrainedModel, converted: PreTrainedModel) -> None:
        self.original = original
        self.mechanisms = {name: m for name, m in mechanisms(converted).items() if next(m.parameters(), None) is not None}
        if not self.mechanisms:
            names = ", ".join(sorted({m.method.info.name for m in every_mechanism(converted).values()}))
            raise UnsupportedError(
                f"attention transfer trains what a mechanism learns, and {names} learns nothing. Leave transfer out: low-rank "
                "finetuning (lora) changes the weights around it."
            )

    def parameters(self) -> dict[str, nn.Parameter]:
        return {f"{site}.{name}": p for site, m in self.mechanisms.items() for name, p in m.named_parameters()}

    def loss(self, batch: Batch) -> Tensor:
        seen, _ = run(self.original, batch)
        losses = []
        for name, mechanism in self.mechanisms.items():
            missed, had = head_errors(seen[name], seen[name].by(mechanism))
            losses.append((missed / had.clamp(min=_TINY)).mean())
        return torch.stack(losses).mean()

    def train(self, mode: bool) -> None:
        for mechanism in self.mechanisms.values():
            mechanism.train(mode)
