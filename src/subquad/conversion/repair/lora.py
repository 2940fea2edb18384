"""Low-rank finetuning of the whole model, to make up for what is lost. The last stage of LoLCATs (Zhang et al., 2024).

What is matched needs no labels of a task:

    "language"    the next token of the text
    "distil"      the original's distribution over the next token, KL(p || p')
    "embedding"   the original's last hidden states, |h' - h|^2 / |h|^2
"""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.conversion.activations import Batch, is_causal_lm, last_states, real_tokens
from subquad.conversion.repair.by_rows import cross_entropy, divergence, mean_loss
from subquad.conversion.repair.low_rank import RANK, LowRank, Targets
from subquad.errors import InputError, OptionError

Loss = Literal["language", "distil", "embedding"]


class Lora(LowRank):
    """Of `converted`, by the original or by the text."""

    name, lr = "lora", 1e-3

    def __init__(
        self,
        original: PreTrainedModel,
        converted: PreTrainedModel,
        loss: Loss | None = None,
        rank: int = RANK,
        targets: Targets = "attention",
    ) -> None:
        self.kind = kind_of(converted, loss)
        super().__init__(original, converted, rank, targets)
        # A change is a sum over ranks, so a step of it grows with their number; through all layers that does harm.
        self.lr *= min(1.0, RANK / rank)

    def loss(self, batch: Batch) -> Tensor:
        after = last_states(self.converted, batch)
        real = real_tokens(batch, after)
        if self.kind == "embedding":
            before = self._before(batch)
            missed, had = ((x.square().sum(-1) * real).sum() for x in (after - before, before))
            return missed / had
        known = real[:, 1:] & real[:, :-1]
        head: Any = self.converted.get_output_embeddings()
        if self.kind == "language":
            loss = cross_entropy(batch["input_ids"].to(after.device)[:, 1:][known])
        else:
            loss = divergence(self._before(batch)[:, :-1][known], head)
        return mean_loss(after[:, :-1][known], head, head.weight.shape[0], loss)

    @torch.no_grad()
    def _before(self, batch: Batch) -> Tensor:
        return last_states(self.original, batch)


def kind_of(converted: PreTrainedModel, loss: str | None) -> Loss:
    """The loss to take for a model, by default the one of its kind."""
    is_causal = is_causal_lm(converted)
    kind = loss or ("language" if is_causal else "embedding")
    if kind not in get_args(Loss):
        raise OptionError(f"the loss of a low-rank finetune is one of {', '.join(get_args(Loss))}; got {kind!r}.")
    if kind != "embedding" and not is_causal:
        raise InputError(f"the {kind} loss is of causal language models; got {type(converted).__name__}. Use embedding.")
    return cast(Loss, kind)
