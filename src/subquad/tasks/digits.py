"""`digits`: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, every pixel a token."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from subquad.errors import load_extra
from subquad.families.base import Mechanism
from subquad.models import SubquadForImageClassification
from subquad.tasks.base import Settings, Splits, TaskInfo
from subquad.tasks.classes import Classification
from subquad.tasks.rows import Columns, model_config, random_order, stack_rows
from subquad.tasks.source import require_length

SIDE = 8
HELD_OUT = 180  # validation rows, and as many test rows


class Digits(Classification):
    """Recognize the digit. The rows are shuffled by the seed, and a fifth is held out."""

    info: ClassVar[TaskInfo] = TaskInfo(
        name="digits",
        idea="handwritten digits of 8 x 8 pixels, every pixel a token",
        kind="bidirectional",
        metric="accuracy",
        higher_is_better=True,
        source="",
        folder="",
        defaults=Settings(length=SIDE**2, layers=3, dim=64, heads=4, batch=64, lr=3e-3, epochs=20),
        options={},
    )

    def load(self, folder: Path | None, settings: Settings) -> Splits:
        require_length(self.info, settings, SIDE**2, "one token per pixel")
        [datasets] = load_extra("train", "the task digits", "sklearn.datasets")
        data = datasets.load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
        rows = Columns(pixel_values=images, labels=torch.tensor(data.target))
        order = random_order(len(rows), settings.seed)
        valid, test, train = order[:HELD_OUT], order[HELD_OUT : 2 * HELD_OUT], order[2 * HELD_OUT :]
        return Splits(rows.take(train), rows.take(valid), rows.take(test), stack_rows)

    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        picture = {"image_size": SIDE, "patch_size": 1, "num_channels": 1, "num_labels": 10}
        places = {"position": "learned", "max_position_embeddings": SIDE**2}
        return SubquadForImageClassification(model_config(method, settings, **picture, **places))
