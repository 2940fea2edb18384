"""The score of tasks with one class per row."""

from __future__ import annotations

import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from subquad.tasks.base import Row, Settings, Splits, Task
from subquad.tasks.rows import predictions


class Classification(Task):
    """Scored by accuracy: the fraction of rows whose class has the largest logit."""

    def score(self, model: PreTrainedModel, rows: Dataset[Row], splits: Splits, settings: Settings) -> dict[str, float]:
        right = count = 0
        nats = 0.0
        for batch, output in predictions(model, rows, splits, settings):
            logits, labels = output.logits.float(), batch["labels"]
            right += int((logits.argmax(1) == labels).sum())
            count += len(labels)
            nats += float(F.cross_entropy(logits, labels, reduction="sum"))
        return {"accuracy": right / count, "loss": nats / count}
