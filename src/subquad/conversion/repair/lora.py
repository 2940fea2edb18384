"""Low-rank finetuning of the whole model. The last stage of LoLCATs (Zhang et al., 2024).

The losses need no labels of a task. What they match:

    "language"    the next token of the text
    "distil"      the original's distribution over the next token, KL(p || p')
    "embedding"   the original's last hidden states, |h' - h|^2 / |h|^2
"""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.conversion.activations import Batch, is_causal_lm, last_hidden_states, real_tokens
from subquad.conversion.repair.chunked_loss import cross_entropy, divergence, mean_loss
from subquad.conversion.repair.low_rank import RANK, LowRank, Targets
from subquad.errors import InputError, OptionError

Loss = Literal["language", "distil", "embedding"]


class Lora(LowRank):
    """Trains `converted` on the outputs of the original, or on the text."""

    name, lr = "lora", 1e-3

    def __init__(
        self,
        original: PreTrainedModel,
        converted: PreTrainedModel,
        loss: Loss | None = None,
        rank: int = RANK,
        targets: Targets = "attention",
    ) -> None:
        self.kind = loss_for(converted, loss)
        super().__init__(original, converted, rank, targets)
        # A change is a sum over ranks, so its steps grow with the rank, which does harm when all layers change together.
        self.lr *= min(1.0, RANK / rank)

    def loss(self, batch: Batch) -> Tensor:
        after = last_hidden_states(self.converted, batch)
        real = real_tokens(batch, after)
        if self.kind == "embedding":
            before = self._before(batch)
            error, size = ((x.square().sum(-1) * real).sum() for x in (after - before, before))
            return error / size
        known = real[:, 1:] & real[:, :-1]
        head: Any = self.converted.get_output_embeddings()
        if self.kind == "language":
            loss = cross_entropy(batch["input_ids"].to(after.device)[:, 1:][known])
        else:
            loss = divergence(self._before(batch)[:, :-1][known], head)
        return mean_loss(after[:, :-1][known], head, head.weight.shape[0], loss)

    @torch.no_grad()
    def _before(self, batch: Batch) -> Tensor:
        return last_hidden_states(self.original, batch)


def loss_for(converted: PreTrainedModel, loss: str | None) -> Loss:
    """`loss`, or the default for this kind of model."""
    is_causal = is_causal_lm(converted)
    kind = loss or ("language" if is_causal else "embedding")
    if kind not in get_args(Loss):
        raise OptionError(f"the loss of low-rank finetuning must be one of {', '.join(get_args(Loss))}; got {kind!r}.")
    if kind != "embedding" and not is_causal:
        raise InputError(f"the {kind} loss needs a causal language model; got {type(converted).__name__}. Use embedding.")
    return cast(Loss, kind)
