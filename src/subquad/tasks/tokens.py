"""Byte-pair encoding, trained on a task's own text each time: a few seconds, and nothing to keep.

Sennrich, Haddow & Birch, 2016, arXiv:1508.07909. Words are split at white space; no merge crosses a word, and every byte has a
token, so any text can be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FIRST = "\u0120"  # how a piece is written that begins a word


def bpe(texts: Iterable[str], size: int, special: Sequence[str]) -> Tokenizer:
    """`size` tokens, the special ones first."""
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
