"""`stsb`: how similar are two sentences, from 0 to 5? Spearman's and Pearson's correlation with human ratings.

Cer et al., 2017, "SemEval-2017 task 1: semantic textual similarity", arXiv:1708.00055; 5,749 training pairs. One encoder reads
each sentence by itself, as in Reimers & Gurevych, 2019, arXiv:1908.10084, and the prediction is the cosine of the two means.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from tokenizers import normalizers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import SequenceClassifierOutput

from subquad.families.base import Mechanism
from subquad.models import SubquadConfig, SubquadModel, SubquadPreTrainedModel
from subquad.models.classification import pooled
from subquad.tasks.base import Batch, Row, Settings, Splits, Task, TaskInfo
from subquad.tasks.rows import Sequences, model_config, pad_sequences, predictions
from subquad.tasks.source import find_file, load_from_hub, parse_rows, read_lines, task_folder
from subquad.tasks.tokens import to_transformers, train_bpe

PAD = 0
PIECES = 4_000
HIGHEST = 5.0
PARTS = {"train": "train", "valid": "dev", "test": "test"}
Pair = tuple[str, str, float]


class STSB(Task):
    """Predict the similarity of two sentences."""

    info: ClassVar[TaskInfo] = TaskInfo(
        name="stsb",
        idea="pairs of sentences: how similar are they?",
        kind="bidirectional",
        metric="spearman",
        higher_is_better=True,
        source="PhilipMay/stsb_multi_mt, en",
        folder="stsb",
        defaults=Settings(length=64, layers=2, dim=128, heads=4, batch=32, lr=1e-3, epochs=4, dropout=0.2),
        options={},
    )

    def load(self, folder: Path | None, settings: Settings) -> Splits:
        pairs = {name: self.split(name, folder) for name in PARTS}
        self.tokenizer = train_bpe([text.lower() for pair in pairs["train"] for text in pair[:2]], PIECES, ["<pad>"])

        def ids(texts: Sequence[str]) -> list[Tensor]:
            written = self.tokenizer.encode_batch_fast([text.lower() for text in texts])
            return [torch.tensor(line.ids[: settings.length], dtype=torch.int32) for line in written]

        def rows(part: list[Pair]) -> Sequences:
            first, second, scores = zip(*part, strict=True)
            return Sequences(torch.tensor(scores), first=ids(first), second=ids(second))

        train, valid, test = (rows(part) for part in pairs.values())
        return Splits(train, valid, test, collate)

    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        found = to_transformers(self.tokenizer, pad_token="<pad>")
        found.backend_tokenizer.normalizer = normalizers.Lowercase()
        return found

    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        return SubquadForSimilarity(
            model_config(method, settings, vocab_size=self.tokenizer.get_vocab_size(), pad_token_id=PAD)
        )

    def score(self, model: PreTrainedModel, rows: Dataset[Row], splits: Splits, settings: Settings) -> dict[str, float]:
        predicted, scores = [], []
        for batch, output in predictions(model, rows, splits, settings):
            predicted.append(output.logits.double().cpu())
            scores.append(batch["labels"].double().cpu())
        ours, theirs = torch.cat(predicted), torch.cat(scores)
        return {
            "spearman": correlation(ranks(ours), ranks(theirs)),
            "pearson": correlation(ours, theirs),
            "loss": float(F.mse_loss(ours, theirs)),
        }

    def split(self, name: str, folder: Path | None) -> list[Pair]:
        if folder is None:
            rows = load_from_hub(self.info, split=PARTS[name])
            return list(zip(rows["sentence1"], rows["sentence2"], rows["similarity_score"], strict=True))
        path = find_file(self.info, task_folder(self.info, folder), [f"stsb-en-{PARTS[name]}.csv"])
        return parse_rows(path, csv.reader(read_lines(path)), _pair, "pair of sentences and a number")


class SubquadForSimilarity(SubquadPreTrainedModel):
    """One encoder for both sentences; 5 times the cosine of the means of their tokens."""

    main_input_name = "first"

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.model = SubquadModel(self.config)
        self.post_init()

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        first_mask: Tensor | None = None,
        second_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """The similarity (B,) of sentences (B, N) and (B, M), and with `labels` (B,) the mean squared error."""
        read = [
            pooled(self.model(ids, mask).last_hidden_state, mask, False)
            for ids, mask in ((first, first_mask), (second, second_mask))
        ]
        logits = HIGHEST * F.cosine_similarity(read[0], read[1])
        loss = None if labels is None else F.mse_loss(logits, labels.to(logits.dtype))
        return SequenceClassifierOutput(loss=loss, logits=logits)


def _pair(row: list[str]) -> Pair:
    first, second, similarity = row
    score = float(similarity)
    if not 0 <= score <= HIGHEST:
        raise ValueError(f"the similarity must be from 0 to {HIGHEST:g}; got {score:g}")
    return first, second, score


def collate(rows: Sequence[Row]) -> Batch:
    first, first_mask = pad_sequences([row["first"] for row in rows], PAD)
    second, second_mask = pad_sequences([row["second"] for row in rows], PAD)
    labels = torch.stack([row["labels"] for row in rows])
    return {"first": first, "first_mask": first_mask, "second": second, "second_mask": second_mask, "labels": labels}


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation; 0 if x or y is constant."""
    x, y = x - x.mean(), y - y.mean()
    spread = float(x.norm() * y.norm())
    return float(x @ y) / spread if spread > 0 else 0.0


def ranks(x: Tensor) -> Tensor:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, group, count = x.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[group]
