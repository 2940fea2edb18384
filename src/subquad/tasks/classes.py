"""What tasks with one class a row have in common: the score."""

from __future__ import annotations

import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from subquad.tasks.base import Row, Settings, Splits, Task
from subquad.tasks.rows import answers


class Classification(Task):
    """Scored by the share of rows whose class has the largest logit."""

    def score(self, model: PreTrainedModel, rows: Dataset[Row], splits: Splits, settings: Settings) -> dict[str, float]:
        right = count = 0
        nats = 0.0
        for batch, output in answers(model, rows, splits, settings):
            logits, labels = output.logits.float(), batch["labels"]
            right += int((logits.argmax(1) == labels).sum())
            count += len(labels)
            nats += float(F.cross_entropy(logits, labels, reduction="sum"))
        return {"accuracy": right / count, "loss": nats / count}
