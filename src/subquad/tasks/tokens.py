"""Byte-pair encoding, trained on a task's own text each time, in a few seconds; and tokenizers to save with a model.

Sennrich, Haddow & Birch, 2016, arXiv:1508.07909. Words are split at white space, and no merge crosses a word boundary. Every
byte has a token, so any text can be encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORD_START = "\u0120"  # the first character of tokens that begin a word


def train_bpe(texts: Iterable[str], size: int, special: Sequence[str]) -> Tokenizer:
    """A tokenizer with `size` tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def word_tokenizer(known: Sequence[str], unknown: str) -> Tokenizer:
    """A tokenizer with one token for each of the `known` words, in this order; any other word is `unknown`."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def to_transformers(tokenizer: Tokenizer, end: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers saves and loads it; `special` are its special tokens, and `end` is added to every text."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    if end is not None:
        copy.post_processor = processors.TemplateProcessing(f"$A {end}", special_tokens=[(end, copy.token_to_id(end))])
    return PreTrainedTokenizerFast(tokenizer_object=copy, clean_up_tokenization_spaces=False, **special)
