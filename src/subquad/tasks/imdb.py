"""`imdb`: reviews of films as bytes, up to 4,000 of them; is a review good or bad?

Maas et al., 2011, "Learning word vectors for sentiment analysis"; as bytes one of the tasks of Tay et al., 2021, "Long Range
Arena", arXiv:2011.04006. Reviews that occur twice count once. From the public source the test half is the test set, and a tenth
of the other is held out to choose by. A local copy is the training half alone, sorted by label: it is shuffled by the seed, and
a tenth is held out to choose by and another to report. Scoring the whole test half would take more than half as long as
training: the score is that of 1,000 reviews, evenly spread over it, or with the option `scored=all` of all.
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
from subquad.tasks.rows import Sequences, padded, shape, shuffled, spread
from subquad.tasks.source import hub, lines, local, one_of, parsed, require_rows

PAD = 256  # behind the bytes
SCORED = {"1000": 1_000, "all": 25_000}  # test reviews, at most
Review = tuple[str, int]


class Imdb(Classification):
    """Good (1) or bad (0), from the first `settings.length` bytes of a review."""

    info: ClassVar[TaskInfo] = TaskInfo(
        name="imdb",
        idea="reviews of films as up to 4,000 bytes, good or bad",
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
        known = [known[i] for i in shuffled(len(known), settings.seed).tolist()]
        tenth = len(known) // 10
        valid, train = known[:tenth], known[tenth:]
        if folder is None:
            texts = {text for text, _ in known}
            test = [review for review in distinct(self.half("test", folder)) if review[0] not in texts]
        else:
            test, train = train[:tenth], train[tenth:]
        rows, scored = partial(_rows, length=settings.length), SCORED[self.options(settings)["scored"]]
        return Splits(rows(train), rows(valid), spread(rows(test), scored), padded(PAD))

    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        return SubquadForSequenceClassification(shape(method, settings, vocab_size=PAD + 1, num_labels=2))

    def half(self, name: str, folder: Path | None) -> list[Review]:
        if folder is None:
            rows = hub(self.info, split=name)
            return list(zip(rows["text"], rows["label"], strict=True))
        path = one_of(self.info, local(self.info, folder), [f"imdb_{name}.jsonl.xz", f"imdb_{name}.jsonl"])
        return parsed(path, lines(path), _review, "review and label")


def distinct(reviews: list[Review]) -> list[Review]:
    """Each text once, as it came first."""
    found: dict[str, int] = {}
    for text, label in reviews:
        found.setdefault(text, label)
    return list(found.items())


def _review(line: str) -> Review:
    row = json.loads(line)
    return str(row["text"]), range(2)[row["label"]]


def _rows(reviews: list[Review], length: int) -> Sequences:
    ids = [byte_ids(text.encode()[:length]).short() for text, _ in reviews]
    return Sequences(torch.tensor([label for _, label in reviews]), input_ids=ids)
