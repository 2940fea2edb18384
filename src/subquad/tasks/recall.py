"""`recall`: multi-query associative recall. Pairs of keys and values, then the keys again in another order: which value?

    k3 v7  k1 v2  k8 v5  ...  ~ ~  k8 ?  ~ ~  k3 ?  ~ ~ ...

Arora et al., 2023, "Zoology: measuring and improving recall in efficient language models", arXiv:2312.04927. Pairs take a
quarter of the sequence, each key is asked for once, and noise fills the gaps between the questions. A state of constant
size has to hold all pairs at once, which is where linear attention is weak.

The model sees every token together with the one before it, through a convolution of width 2. So each value is next to its
key from the first layer on, and the score measures how much a mechanism can hold, not whether two layers learn to look one
token back.

B rows, P pairs, N tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from subquad.errors import InputError
from subquad.families.base import Mechanism
from subquad.models import SubquadConfig, SubquadForCausalLM
from subquad.models.inputs import IGNORED
from subquad.tasks.base import Row, Settings, Splits, Task, TaskInfo
from subquad.tasks.language import sum_nats
from subquad.tasks.rows import Columns, model_config, stack_rows

KEYS = VALUES = 256  # tokens: first keys, then values, then noise
NOISE = KEYS + VALUES
TRAIN, HELD_OUT = 40_000, 1_000  # rows
MIN_LENGTH = 16  # tokens: two pairs, and their questions


class Recall(Task):
    """Predict the value of each key that is repeated; loss and accuracy count only there."""

    info: ClassVar[TaskInfo] = TaskInfo(
        name="recall",
        idea="multi-query associative recall: pairs of keys and values, then keys again",
        kind="causal",
        metric="accuracy",
        higher_is_better=True,
        source="",
        folder="",
        defaults=Settings(length=64, layers=2, dim=64, heads=2, batch=32, lr=3e-3, steps=1_500),
        options={},
    )

    def load(self, folder: Path | None, settings: Settings) -> Splits:
        length = settings.length
        if length < MIN_LENGTH or length % 8:
            raise InputError(
                f"the length of recall must be a multiple of 8 and at least {MIN_LENGTH}, because pairs take a quarter of it; "
                f"got {length}. Choose --length 64, for example."
            )
        if length // 8 > KEYS:
            raise InputError(f"the length of recall must be at most {8 * KEYS}, because it has {KEYS} keys; got {length}.")
        generator = torch.Generator().manual_seed(settings.seed)
        valid, test, train = (generate(count, length, generator) for count in (HELD_OUT, HELD_OUT, TRAIN))
        return Splits(train, valid, test, stack_rows)

    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        return SubquadForRecall(model_config(method, settings, vocab_size=NOISE + 1))

    def score(self, model: PreTrainedModel, rows: Dataset[Row], splits: Splits, settings: Settings) -> dict[str, float]:
        total, count, right = sum_nats(model, rows, splits, settings)
        return {"accuracy": right / count, "loss": total / count}


class SubquadForRecall(SubquadForCausalLM):
    """A causal model that reads each token together with the one before it: x_t + W x_(t-1)."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.before = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.post_init()

    @classmethod
    def can_generate(cls) -> bool:
        return False  # it keeps no token from before the start of its input

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **given: Any) -> CausalLMOutputWithPast:
        x = self.get_input_embeddings()(input_ids)
        return super().forward(
            inputs_embeds=x + F.pad(self.before(x)[:, :-1], (0, 0, 1, 0)), labels=labels, use_cache=False, **given
        )


def generate(count: int, length: int, generator: torch.Generator) -> Columns:
    """`count` rows; the label after each question is the value, all other labels are ignored."""
    pairs = length // 8
    keys = _choose(count, KEYS, pairs, generator)
    values = torch.randint(KEYS, KEYS + VALUES, (count, pairs), generator=generator)
    ids = torch.full((count, length), NOISE)
    ids[:, : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    asked = 2 * pairs + 2 * _choose(
        count, (length - 2 * pairs) // 2, pairs, generator
    )  # even positions, so that an answer fits after each
    ids.scatter_(1, asked, keys)
    labels = torch.full_like(ids, IGNORED).scatter_(1, asked + 1, values)
    return Columns(input_ids=ids, labels=labels)


def _choose(count: int, below: int, chosen: int, generator: torch.Generator) -> Tensor:
    """(count, chosen): in each row distinct numbers below `below`, in random order."""
    return torch.rand(count, below, generator=generator).argsort(1)[:, :chosen]
