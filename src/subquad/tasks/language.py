"""What tasks of causal language modelling share: blocks of text, the model, and the loss per token."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from subquad.errors import InputError
from subquad.families.base import Mechanism
from subquad.models import SubquadForCausalLM
from subquad.models.inputs import IGNORED
from subquad.tasks.base import Row, Settings, Splits, Task
from subquad.tasks.rows import Blocks, model_config, predictions, stack_rows
from subquad.tasks.source import require_rows

BYTES = "bytes"  # the tokenizer_class of models whose tokens are bytes, and that have no tokenizer


class LanguageModel(Task):
    """Predict each token from those before it in a block of `settings.length`."""

    def splits(self, train: Tensor, valid: Tensor, test: Tensor, settings: Settings) -> Splits:
        """Token ids (T,) of three texts, in blocks."""
        if settings.length < 2:
            raise InputError(f"{self.info.name} predicts tokens from those before them, so --length must be at least 2; got 1.")
        for name, text in {"training": train, "validation": valid, "test": test}.items():
            advice = "Choose a smaller --length, or get a longer text."
            require_rows(self.info, len(text), settings.length, f"tokens of {name} text, one block of --length", advice)
        learned, chosen_by, reported = (Blocks(text, settings.length) for text in (train, valid, test))
        return Splits(learned, chosen_by, reported, stack_rows)

    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        return SubquadForCausalLM(model_config(method, settings, vocab_size=self.vocabulary))

    @property
    def vocabulary(self) -> int:
        """The number of different tokens; those of bytes unless a task overrides it."""
        return 256


class ByteModel(LanguageModel):
    """A language model of bytes, scored in bits per byte; its configuration says that its tokens are bytes."""

    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        found = super().model(method, settings)
        found.config.tokenizer_class = BYTES
        return found

    def score(self, model: PreTrainedModel, rows: Dataset[Row], splits: Splits, settings: Settings) -> dict[str, float]:
        total, count, _ = sum_nats(model, rows, splits, settings)
        return {"bits_per_byte": total / count / math.log(2), "loss": total / count}


def byte_ids(text: bytes) -> Tensor:
    """(T,) uint8."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def sum_nats(model: PreTrainedModel, rows: Dataset[Row], splits: Splits, settings: Settings) -> tuple[float, int, int]:
    """The sum of -log p over all labels, their number, and how many of them have the largest logit."""
    total, count, right = 0.0, 0, 0
    for batch, output in predictions(model, rows, splits, settings):
        labels = batch["labels"][:, 1:]
        logits = output.logits[:, :-1].flatten(0, 1).float()
        total += float(F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum"))
        count += int((labels != IGNORED).sum())
        right += int((logits.argmax(1) == labels.flatten()).sum())
    return total, count, right
