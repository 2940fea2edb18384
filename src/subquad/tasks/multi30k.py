"""`multi30k`: translation of 29,000 photograph captions by an encoder and a decoder that attends to it; BLEU.

Elliott et al., 2016, "Multi30K: multilingual English-German image descriptions", arXiv:1605.00459. Both languages share a
vocabulary of 8,000 word pieces. The method is the self-attention of encoder and decoder. Cross-attention is softmax, or the
same method with the option `cross=same`. The score is sacreBLEU on the 2016 test set, by beam search with 4 beams; on the
validation set, during training, by greedy search.
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
from subquad.tasks.rows import Ragged, model_config, pad_sequences, predictions
from subquad.tasks.source import DataError, download_advice, find_file, load_from_hub, read_lines, task_folder
from subquad.tasks.tokens import to_transformers, train_bpe

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
PAD, START, END = range(3)
PIECES = 8_000
BEAMS = 4
PAIRS = ("en-de", "de-en", "en-fr", "fr-en", "de-fr", "fr-de")
PARTS = {
    "train": ("train", "train"),
    "valid": ("val", "validation"),
    "test": ("test_2016_flickr", "test"),
}  # local name, public name


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
                counts = f"{len(source)} in {pair[0]} and {len(target)} in {pair[1]}"
                raise DataError(f"multi30k needs as many lines in both languages; {name} has {counts}.")
        self.tokenizer = train_bpe([*texts["train"][0], *texts["train"][1]], PIECES, list(SPECIAL.values()))
        write = partial(self.ids, most=settings.length)
        train, valid, test = (Captions(write(source), write(target), target) for source, target in texts.values())
        return Splits(train, valid, test, collate)

    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        return to_transformers(self.tokenizer, end=SPECIAL["eos_token"], **SPECIAL)

    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        config = model_config(
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
        for batch, output in predictions(model, rows, splits, settings):
            logits, labels = output.logits.flatten(0, 1).float(), batch["labels"].flatten()
            nats += float(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
            count += int((labels != IGNORED).sum())
        beams = BEAMS if rows is splits.test else 1
        return {"bleu": self.bleu(model, rows, settings, beams), "loss": nats / count}

    def bleu(self, model: PreTrainedModel, rows: Dataset[Row], settings: Settings, beams: int) -> float:
        """sacreBLEU of the model's translations, with its default tokenizer (13a)."""
        [sacrebleu] = load_extra("train", "the score of multi30k", "sacrebleu")
        todo = [rows[i] for i in range(len(rows))]  # type: ignore[arg-type]
        todo.sort(key=lambda row: len(row["input_ids"]))  # less padding
        translations: list[str] = []
        for first in range(0, len(todo), settings.batch):
            ids, mask = pad_sequences([row["input_ids"] for row in todo[first : first + settings.batch]], PAD)
            search = {"num_beams": beams, "do_sample": False, "max_new_tokens": settings.length}
            written = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **search)
            translations += [text.strip() for text in self.tokenizer.decode_batch(written.tolist(), skip_special_tokens=True)]
        return float(sacrebleu.corpus_bleu(translations, [[row["reference"] for row in todo]]).score)

    def ids(self, texts: list[str], most: int) -> list[Tensor]:
        """The tokens of each text and the end token, `most` of them at most."""
        written = self.tokenizer.encode_batch_fast(texts)
        return [torch.tensor([*line.ids[: most - 1], END], dtype=torch.int32) for line in written]

    def split(self, name: str, language: str, folder: Path | None) -> list[str]:
        """The lines of one split in one language."""
        file, public = PARTS[name]
        if folder is not None:
            path = find_file(self.info, task_folder(self.info, folder), [f"{file}.{language}.gz", f"{file}.{language}"])
            return [line.strip() for line in read_lines(path)]
        rows = load_from_hub(self.info, split=public)
        if language not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise DataError(f"{self.info.source} has {columns}; {language} needs a local copy. {download_advice(self.info)}")
        return [line.strip() for line in rows[language]]


class Captions(Dataset[Row]):
    """The ids of a text and of its translation, and the translation as text."""

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
    """Sources with their mask; targets as labels and, shifted right by one, as decoder inputs."""
    ids, mask = pad_sequences([row["input_ids"] for row in rows], PAD)
    target, real = pad_sequences([row["target"] for row in rows], PAD)
    start = torch.full_like(target[:, :1], START)
    read = torch.cat([start, target[:, :-1]], dim=1)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": read, "labels": target.masked_fill(~real, IGNORED)}
