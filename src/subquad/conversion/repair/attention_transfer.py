"""Attention transfer: each mechanism learns to return what softmax returned, without labels.

The mechanism of each converted site gets the queries, keys and values that the original model has there, and learns to return
the original's output:

    L = mean over sites and heads of  |o' - o|^2 / |o|^2

Only the parameters of the mechanisms are trained, and sites learn independently. The first stage of LoLCATs (Zhang et al.,
2024), there without the denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.conversion.activations import Batch, run_recorded
from subquad.conversion.diagnosis import head_errors
from subquad.conversion.repair.loop import Stage
from subquad.errors import UnsupportedError
from subquad.models.converted.installation import all_mechanisms, mechanisms

_TINY = 1e-9


class Transfer(Stage):
    """Trains the mechanisms of `converted` to match `original`, which must be `recordable`."""

    name, lr = "transfer", 1e-2

    def __init__(self, original: PreTrainedModel, converted: PreTrainedModel) -> None:
        self.original = original
        self.mechanisms = {name: m for name, m in mechanisms(converted).items() if next(m.parameters(), None) is not None}
        if not self.mechanisms:
            names = ", ".join(sorted({m.method.info.name for m in all_mechanisms(converted).values()}))
            raise UnsupportedError(
                f"attention transfer trains the parameters of mechanisms, and {names} has none. Leave transfer out; low-rank "
                "finetuning (lora) trains the weights around it."
            )

    def parameters(self) -> dict[str, nn.Parameter]:
        return {f"{site}.{name}": p for site, m in self.mechanisms.items() for name, p in m.named_parameters()}

    def loss(self, batch: Batch) -> Tensor:
        calls, _ = run_recorded(self.original, batch)
        losses = []
        for name, mechanism in self.mechanisms.items():
            error, size = head_errors(calls[name], calls[name].replay(mechanism))
            losses.append((error / size.clamp(min=_TINY)).mean())
        return torch.stack(losses).mean()

    def train(self, mode: bool) -> None:
        for mechanism in self.mechanisms.values():
            mechanism.train(mode)
