"""`multi30k`: 29,000 captions of photographs, translated: an encoder, and a decoder that attends to it; BLEU.

Elliott et al., 2016, "Multi30K: multilingual English-German image descriptions", arXiv:1605.00459. Both languages share 8,000
pieces of words. The named method is the self-attention of both sides. Cross-attention is softmax, or with the option
`cross=same` the named method, too. Scores are sacreBLEU's over the 2016 test set as it was written, by beam search with 4
beams; those of the validation set, while training, by greedy search.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from subquad.errors import load_extra
from subquad.families.base import Mechanism
from subquad.models import SubquadForConditionalGeneration
from subquad.models.inputs import IGNORED
from subquad.tasks.base import Batch, Row, Settings, Splits, Task, TaskInfo
from subquad.tasks.rows import Ragged, answers, fill, shape
from subquad.tasks.source import DataError, how_to_get, hub, lines, local, one_of
from subquad.tasks.tokens import bpe, kept

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
PAD, START, END = range(3)
PIECES = 8_000
BEAMS = 4
PAIRS = ("en-de", "de-en", "en-fr", "fr-en", "de-fr", "fr-de")
PARTS = {"train": ("train", "train"), "valid": ("val", "validation"), "test": ("test_2016_flickr", "test")}  # local, public


class Multi30k(Task):
    """Translate a caption."""

    info: ClassVar[TaskInfo] = TaskInfo(
        name="multi30k",
        idea="captions of photographs, translated by an encoder and a decoder",
        kind="encoder-decoder",
        metric="bleu",
        higher_is_better=True,
        source="bentrevett/multi30k",
        folder="multi30k",
        defaults=Settings(length=64, layers=3, dim=128, heads=4, batch=64, lr=2e-3, epochs=6, dropout=0.1, label_smoothing=0.1),
        options={"pair": PAIRS, "cross": ("softmax", "same")},
    )

    def load(self, folder: Path | None, settings: Settings) -> Splits:
        pair = self.options(settings)["pair"].split("-")
        texts = {name: [self.split(name, language, folder) for language in pair] for name in PARTS}
        for name, (source, target) in texts.items():
            if len(source) != len(target):
                raise DataError(f"multi30k pairs lines; {name} has {len(source)} of {pair[0]} and {len(target)} of {pair[1]}.")
        self.tokenizer = bpe([*texts["train"][0], *texts["train"][1]], PIECES, list(SPECIAL.values()))
        write = partial(self.ids, most=settings.length)
        train, valid, test = (Captions(write(source), write(target), target) for source, target in texts.values())
        return Splits(train, valid, test, collate)

    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        return kept(self.tokenizer, end=SPECIAL["eos_token"], **SPECIAL)

    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        config = shape(
            method,
            settings,
            vocab_size=self.tokenizer.get_vocab_size(),
            is_encoder_decoder=True,
            cross_method="softmax" if self.options(settings)["cross"] == "softmax" else None,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=START,
        )
        return SubquadForConditionalGeneration(config)

    def score(self, model: PreTrainedModel, rows: Dataset[Row], splits: Splits, settings: Settings) -> dict[str, float]:
        nats, count = 0.0, 0
        for batch, output in answers(model, rows, splits, settings):
            logits, labels = output.logits.flatten(0, 1).float(), batch["labels"].flatten()
            nats += float(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
            count += int((labels != IGNORED).sum())
        beams = BEAMS if rows is splits.test else 1
        return {"bleu": self.bleu(model, rows, settings, beams), "loss": nats / count}

    def bleu(self, model: PreTrainedModel, rows: Dataset[Row], settings: Settings, beams: int) -> float:
        """sacreBLEU of the model's translations, with its own tokens (13a)."""
        [sacrebleu] = load_extra("train", "the score of multi30k", "sacrebleu")
        read = [rows[i] for i in range(len(rows))]  # type: ignore[arg-type]
        read.sort(key=lambda row: len(row["input_ids"]))  # few pads
        said: list[str] = []
        for first in range(0, len(read), settings.batch):
            ids, mask = fill([row["input_ids"] for row in read[first : first + settings.batch]], PAD)
            search = {"num_beams": beams, "do_sample": False, "max_new_tokens": settings.length}
            written = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **search)
            said += [text.strip() for text in self.tokenizer.decode_batch(written.tolist(), skip_special_tokens=True)]
        return float(sacrebleu.corpus_bleu(said, [[row["reference"] for row in read]]).score)

    def ids(self, texts: list[str], most: int) -> list[Tensor]:
        """Pieces of each text and the end, `most` of them at most."""
        written = self.tokenizer.encode_batch_fast(texts)
        return [torch.tensor([*line.ids[: most - 1], END], dtype=torch.int32) for line in written]

    def split(self, name: str, language: str, folder: Path | None) -> list[str]:
        """The lines of a part in one language."""
        file, public = PARTS[name]
        if folder is not None:
            path = one_of(self.info, local(self.info, folder), [f"{file}.{language}.gz", f"{file}.{language}"])
            return [line.strip() for line in lines(path)]
        rows = hub(self.info, split=public)
        if language not in rows.column_names:
            there = ", ".join(rows.column_names)
            raise DataError(f"{self.info.source} has {there}; {language} needs a local copy. {how_to_get(self.info)}")
        return [line.strip() for line in rows[language]]


class Captions(Dataset[Row]):
    """Ids of a text and of its translation, and the translation as it was written."""

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor], references: list[str]) -> None:
        self.sources, self.targets, self.references = Ragged(sources), Ragged(targets), references

    def __len__(self) -> int:
        return len(self.references)

    def __getitem__(self, index: int) -> Row:
        return {"input_ids": self.sources[index], "target": self.targets[index], "reference": self.references[index]}

    @property
    def lengths(self) -> list[tuple[int, ...]]:
        return list(zip(self.sources.lengths, self.targets.lengths, strict=True))


def collate(rows: Sequence[Row]) -> Batch:
    """Sources with their mask; targets as labels and, moved right by one, as what the decoder reads."""
    ids, mask = fill([row["input_ids"] for row in rows], PAD)
    target, real = fill([row["target"] for row in rows], PAD)
    start = torch.full_like(target[:, :1], START)
    read = torch.cat([start, target[:, :-1]], dim=1)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": read, "labels": target.masked_fill(~real, IGNORED)}
