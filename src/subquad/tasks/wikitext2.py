"""`wikitext2`: language modelling over two million words of Wikipedia; perplexity per word.

Merity et al., 2017, "Pointer sentinel mixture models", arXiv:1609.07843. The end of a line counts as a word, and rare words
are `<unk>` in the data. With the option `tokens=bpe` words are split into 4,000 different pieces; perplexity is exp(nats /
words) in both cases, so that figures with `bpe` and `word` can be compared.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import ClassVar

import torch
from tokenizers import Tokenizer
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from subquad.models.inputs import IGNORED
from subquad.tasks.base import Row, Settings, Splits, TaskInfo
from subquad.tasks.language import LanguageModel, sum_nats
from subquad.tasks.source import find_file, load_from_hub, read_lines, task_folder
from subquad.tasks.tokens import WORD_START, to_transformers, train_bpe, word_tokenizer

END, UNKNOWN = "<eos>", "<unk>"
PIECES = 4_000
_MAX_EXPONENT = math.log(sys.float_info.max)
HUB = {"train": "train", "valid": "validation", "test": "test"}


class WikiText2(LanguageModel):
    """Perplexity per word of WikiText-2."""

    info: ClassVar[TaskInfo] = TaskInfo(
        name="wikitext2",
        idea="Wikipedia articles, language modelling over words or their pieces",
        kind="causal",
        metric="perplexity",
        higher_is_better=False,
        source="Salesforce/wikitext, wikitext-2-v1",
        folder="wikitext2",
        defaults=Settings(length=128, layers=4, dim=128, heads=4, batch=16, lr=3e-3, steps=1_200, dropout=0.1),
        options={"tokens": ("bpe", "word")},
    )

    def load(self, folder: Path | None, settings: Settings) -> Splits:
        texts = [self.split(name, folder) for name in HUB]
        in_words = self.options(settings)["tokens"] == "word"
        self.tokenizer = _words(texts[0]) if in_words else train_bpe(texts[0], PIECES, [UNKNOWN, END])
        tokens = self.tokenizer.get_vocab()
        self.begins = torch.tensor(
            [
                in_words or token in (END, UNKNOWN) or token.startswith(WORD_START)
                for token in sorted(tokens, key=tokens.__getitem__)
            ]
        )
        end = self.tokenizer.token_to_id(END)
        written = [self.tokenizer.encode_batch_fast(text) for text in texts]
        train, valid, test = (torch.tensor([i for line in text for i in (*line.ids, end)]) for text in written)
        return self.splits(train, valid, test, settings)

    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        return to_transformers(self.tokenizer, unk_token=UNKNOWN, eos_token=END)

    @property
    def vocabulary(self) -> int:
        return len(self.begins)

    def score(self, model: PreTrainedModel, rows: Dataset[Row], splits: Splits, settings: Settings) -> dict[str, float]:
        total, count, _ = sum_nats(model, rows, splits, settings)
        per_word = total / self.words(rows)
        return {"perplexity": math.exp(per_word) if per_word < _MAX_EXPONENT else math.inf, "loss": total / count}

    def words(self, rows: Dataset[Row]) -> int:
        """The number of words that begin in the labels of `rows`."""
        labels = torch.cat([rows[i]["labels"] for i in range(len(rows))])  # type: ignore[arg-type]
        return int(self.begins[labels[labels != IGNORED]].sum())

    def split(self, name: str, folder: Path | None) -> list[str]:
        """The lines of one split."""
        if folder is None:
            return [line.removesuffix("\n") for line in load_from_hub(self.info, split=HUB[name])["text"]]
        return read_lines(
            find_file(self.info, task_folder(self.info, folder), [f"{name}.txt.xz", f"{name}.txt", f"wiki.{name}.tokens"])
        )


def _words(text: list[str]) -> Tokenizer:
    """A tokenizer with all words of the text."""
    found = {word for line in text for word in line.split()}
    return word_tokenizer([UNKNOWN, END, *sorted(found - {UNKNOWN, END})], UNKNOWN)
