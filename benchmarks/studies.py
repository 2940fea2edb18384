"""The pretrained models that are converted, to which mechanisms, how they are scored, and what their repairs learn from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import subquad as sq
from benchmarks import pretrained
from benchmarks.generated_text import generate_text
from benchmarks.pretrained import Batch, Pretrained
from subquad.conversion import Schedule
from subquad.conversion.repair.lora import Loss
from subquad.conversion.repair.low_rank import Targets
from subquad.families.base import Mechanism

GENERATED = 6144  # sequences of 256 tokens


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Low-rank changes of linear maps: for how long, and of which."""

    schedule: Schedule
    rank: int = 16
    targets: Targets = "attention"

    def arguments(self) -> dict[str, Any]:
        """The arguments of `align`, and with a loss those of `finetune`."""
        return {"rank": self.rank, "targets": self.targets}

    def settings(self) -> dict[str, Any]:
        return {**asdict(self.schedule), **self.arguments()}


@dataclass(frozen=True, kw_only=True)
class Finetune(Changes):
    """Low-rank finetuning of the whole model with a loss."""

    loss: Loss

    def arguments(self) -> dict[str, Any]:
        return {"loss": self.loss, **super().arguments()}


Read = Callable[[Pretrained, Path, Path], list[Batch]]


@dataclass(frozen=True)
class Text:
    """What a repair learns from.

    Args:
        about: what it is; part of the settings of a row.
        batches: for a model, from a folder with real text and one for files to keep; the first ones are for evaluation.
    """

    about: str
    batches: Read


@dataclass(frozen=True, kw_only=True)
class Repair:
    """The stages of a repair, and the text that they learn from."""

    text: Text
    transfer: Schedule
    align: Changes | None = None
    finetune: Finetune

    def settings(self) -> dict[str, Any]:
        stages = {"transfer": asdict(self.transfer), "finetune": self.finetune.settings()}
        return {"text": self.text.about, **stages, **({"align": self.align.settings()} if self.align else {})}


@dataclass(frozen=True, kw_only=True)
class Study:
    """One model.

    Args:
        about: what the reader must know about it.
        metrics: headings of the figures that `score` returns.
        rows: the mechanisms that the model is converted to.
        longer: longer repairs, for rows that have lost more.
        unrepaired: rows that show the swap alone.
    """

    name: str
    title: str
    about: str
    metrics: Mapping[str, str]
    load: Callable[[Path], Pretrained]
    score: Callable[[Pretrained, Path], dict[str, float]]
    rows: Mapping[str, Mechanism]
    repair: Repair
    longer: Mapping[str, Repair] = field(default_factory=dict)
    unrepaired: tuple[str, ...] = ()

    def repair_of(self, row: str) -> Repair:
        return self.longer.get(row, self.repair)


def _sts(read: Pretrained, data: Path) -> dict[str, float]:
    return {"spearman": pretrained.sts(read, data)}


def _sentences(read: Pretrained, data: Path, folder: Path) -> list[Batch]:
    return pretrained.sentences(read.tokenizer, data)


def _story_nats(read: Pretrained, data: Path) -> dict[str, float]:
    tests = [pretrained.begun(read.tokenizer, text, 256) for text in pretrained.stories(data, "test")[:60]]
    return {"nats": pretrained.nats(read.model, tests)}


def _stories(read: Pretrained, data: Path, folder: Path) -> list[Batch]:
    return pretrained.packed(read.tokenizer, pretrained.stories(data, "val"), 256, 2)


def _more_stories(read: Pretrained, data: Path, folder: Path) -> list[Batch]:
    return _stories(read, data, folder) + [{"input_ids": rows} for rows in generate_text(read, GENERATED, 256, folder).split(2)]


def _perplexities(read: Pretrained, data: Path) -> dict[str, float]:
    texts = {"wikitext2": pretrained.wikitext(data, "test"), "war_and_peace": pretrained.war_and_peace(data)}
    found = {}
    for name, text in texts.items():
        rows = [batch["input_ids"] for batch in pretrained.packed(read.tokenizer, [text[:200_000]], 2048, 1)[:4]]
        found[name] = math.exp(pretrained.nats(read.model, rows))
    return found


def _articles(read: Pretrained, data: Path, folder: Path) -> list[Batch]:
    return pretrained.packed(read.tokenizer, [pretrained.wikitext(data, "train")[:2_000_000]], 1024, 1)


STUDIES = {
    study.name: study
    for study in (
        Study(
            name="minilm",
            title="all-MiniLM-L6-v2 on STS-B",
            about="A sentence encoder with 6 layers of 12 heads. Spearman's correlation on the 1,379 test pairs; higher is "
            "better. Repairs learn the original's last hidden states, from the sentences of the training pairs without their "
            "ratings.",
            metrics={"spearman": "Spearman"},
            load=lambda data: pretrained.minilm(),
            score=_sts,
            rows={
                "softmax": sq.Softmax(),
                "hedgehog": sq.Hedgehog(),
                "performer-256": sq.Performer(features=256),
                "linear": sq.Linear(),
                "t2r": sq.T2R(),
                "performer-64": sq.Performer(features=64),
                "local-4": sq.Local(window=4),
                "hybrid-4": sq.Hybrid(window=4),
                "rfa": sq.RFA(),
                "nystrom-8": sq.Nystrom(landmarks=8),
            },
            repair=Repair(
                text=Text("sentences of STS-B's training pairs", _sentences),
                transfer=Schedule(steps=600, lr=2e-2, every=100, minutes=4, held_out=0.03),
                finetune=Finetune(schedule=Schedule(steps=600, lr=1e-3, every=100, minutes=6, held_out=0.03), loss="embedding"),
            ),
            unrepaired=("softmax",),
        ),
        Study(
            name="stories15m",
            title="stories15M on TinyStories",
            about="A language model with 6 layers of 6 heads and a context of 256. Nats per token over the first 256 tokens of "
            "60 test stories; lower is better. Repairs learn the original's distribution over the next token, from other "
            "stories.",
            metrics={"nats": "nats"},
            load=pretrained.stories15m,
            score=_story_nats,
            rows={
                "softmax": sq.Softmax(),
                "hybrid-32": sq.Hybrid(window=31, map="t2r", features=96),  # and the token itself
                "hedgehog": sq.Hedgehog(),
                "local-32": sq.Local(window=31),
                "local-64": sq.Local(window=63),
                "linear": sq.Linear(),
                "performer-256": sq.Performer(features=256),
            },
            repair=Repair(
                text=Text("stories", _stories),
                transfer=Schedule(steps=2600, lr=2e-2, every=200, held_out=0.02),
                finetune=Finetune(schedule=Schedule(steps=500, lr=5e-4, every=100, held_out=0.02), loss="distil"),
            ),
            longer={
                "hedgehog": Repair(
                    text=Text(f"stories, and {GENERATED * 256:,} tokens that the original tells itself", _more_stories),
                    transfer=Schedule(steps=6000, lr=2e-2, every=400, held_out=0.005, precision="bf16"),
                    align=Changes(
                        schedule=Schedule(steps=9000, lr=1e-3, every=500, held_out=0.005, precision="bf16"),
                        rank=64,
                        targets="all",
                    ),
                    finetune=Finetune(
                        schedule=Schedule(steps=5000, lr=1e-4, every=250, held_out=0.005, precision="bf16"),
                        loss="distil",
                        rank=64,
                        targets="all",
                    ),
                ),
            },
            unrepaired=("softmax", "local-64", "linear", "performer-256"),
        ),
        Study(
            name="smollm2",
            title="SmolLM2-135M on WikiText-2 and War and Peace",
            about="A language model with 30 layers of 9 query heads and 3 key-value heads. Perplexity per token over 4 "
            "sequences of 2,048 tokens of each text; lower is better. Repairs learn the original's distribution over the next "
            "token, from WikiText-2's training articles and from nothing of War and Peace.",
            metrics={"wikitext2": "WikiText-2", "war_and_peace": "War and Peace"},
            load=lambda data: pretrained.smollm2(),
            score=_perplexities,
            rows={
                "softmax": sq.Softmax(),
                "local-256": sq.Local(window=255),
                "hybrid-256": sq.Hybrid(window=255),
                "performer-256": sq.Performer(features=256),
                "linear": sq.Linear(),
            },
            repair=Repair(
                text=Text("WikiText-2's training articles", _articles),
                transfer=Schedule(steps=60, lr=2e-2, every=20, held_out=0.01, precision="bf16"),
                finetune=Finetune(
                    schedule=Schedule(steps=60, lr=1e-3, every=20, held_out=0.01, precision="bf16"), loss="distil"
                ),
            ),
            unrepaired=("softmax", "linear"),
        ),
    )
}
