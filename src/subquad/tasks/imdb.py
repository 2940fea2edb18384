"""`imdb`: film reviews as up to 4,000 bytes; is a review positive or negative?

Maas et al., 2011, "Learning word vectors for sentiment analysis"; as bytes one of the tasks of Tay et al., 2021, "Long
Range Arena", arXiv:2011.04006. Duplicate reviews count once. From the public source, the test half is the test set, and a
tenth of the training half is held out for validation. A local copy has the training half only, sorted by label: it is
shuffled by the seed, and a tenth is held out for validation and another for testing. Scoring the whole test half would take
more than half as long as training, so the score is that of 1,000 reviews at even distances, or of all with the option
`scored=all`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from subquad.families.base import Mechanism
from subquad.models import SubquadForSequenceClassification
from subquad.tasks.base import Settings, Splits, TaskInfo
from subquad.tasks.classes import Classification
from subquad.tasks.language import byte_ids
from subquad.tasks.rows import Sequences, evenly_spaced, model_config, pad_rows, random_order
from subquad.tasks.source import find_file, load_from_hub, parse_rows, read_lines, require_rows, task_folder

PAD = 256  # after the bytes
SCORED = {"1000": 1_000, "all": 25_000}  # maximum number of test reviews
Review = tuple[str, int]


class Imdb(Classification):
    """Positive (1) or negative (0), from the first `settings.length` bytes of a review."""

    info: ClassVar[TaskInfo] = TaskInfo(
        name="imdb",
        idea="film reviews as up to 4,000 bytes, positive or negative",
        kind="bidirectional",
        metric="accuracy",
        higher_is_better=True,
        source="stanfordnlp/imdb",
        folder="imdb",
        defaults=Settings(length=4_000, layers=2, dim=64, heads=2, batch=16, lr=1e-3, steps=600, dropout=0.1),
        options={"scored": tuple(SCORED)},
    )

    def load(self, folder: Path | None, settings: Settings) -> Splits:
        known = distinct(self.half("train", folder))
        require_rows(self.info, len(known), 10, "different training reviews", "Get the data again.")
        known = [known[i] for i in random_order(len(known), settings.seed).tolist()]
        tenth = len(known) // 10
        valid, train = known[:tenth], known[tenth:]
        if folder is None:
            texts = {text for text, _ in known}
            test = [review for review in distinct(self.half("test", folder)) if review[0] not in texts]
        else:
            test, train = train[:tenth], train[tenth:]
        rows, scored = partial(_rows, length=settings.length), SCORED[self.options(settings)["scored"]]
        return Splits(rows(train), rows(valid), evenly_spaced(rows(test), scored), pad_rows(PAD))

    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        return SubquadForSequenceClassification(model_config(method, settings, vocab_size=PAD + 1, num_labels=2))

    def half(self, name: str, folder: Path | None) -> list[Review]:
        if folder is None:
            rows = load_from_hub(self.info, split=name)
            return list(zip(rows["text"], rows["label"], strict=True))
        path = find_file(self.info, task_folder(self.info, folder), [f"imdb_{name}.jsonl.xz", f"imdb_{name}.jsonl"])
        return parse_rows(path, read_lines(path), _review, "review and label")


def distinct(reviews: list[Review]) -> list[Review]:
    """Each text once, with its first label."""
    found: dict[str, int] = {}
    for text, label in reviews:
        found.setdefault(text, label)
    return list(found.items())


def _review(line: str) -> Review:
    row = json.loads(line)
    text, label = row["text"], row["label"]
    text.encode()  # refuses what is not text
    return text, range(2).index(label)


def _rows(reviews: list[Review], length: int) -> Sequences:
    ids = [byte_ids(text.encode()[:length]).short() for text, _ in reviews]
    return Sequences(torch.tensor([label for _, label in reviews]), input_ids=ids)
