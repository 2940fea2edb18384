"""Calibration text: files as batches of token ids. Some are used to evaluate a conversion, the others to repair it.

A causal model reads the text as one stream, cut into sequences of one length, each after the tokenizer's BOS token. Other
models read every line as one sequence, with the tokenizer's special tokens, padded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from subquad.conversion.activations import is_causal_lm
from subquad.conversion.diagnosis import MIN_TOKENS, tokens_of
from subquad.conversion.pretrained import context_of
from subquad.errors import InputError
from subquad.tasks.source import read_bytes

LENGTH = 256  # default length of a sequence, unless the context of the model is shorter
_EVALUATION_SHARE, _MIN_SEQUENCES = 0.1, 4  # of the sequences that measure
_PIECE = 200_000  # characters that are tokenized at a time

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Calibration:
    """Batches for evaluation, and other batches for training."""

    evaluation: list[Batch]
    training: list[Batch]

    @property
    def tokens(self) -> int:
        return sum(tokens_of(batch) for batch in (*self.evaluation, *self.training))

    def fingerprint(self) -> str:
        """The same for the same tokens in the same batches."""
        digest = hashlib.sha256()
        for batch in (*self.evaluation, *self.training):
            digest.update(batch["input_ids"].numpy().tobytes())
        return digest.hexdigest()[:16]


def calibration(
    model: PreTrainedModel,
    tokenizer: Any,
    files: Sequence[Path],
    *,
    length: int | None = None,
    batch: int = 8,
    tokens: int = 200_000,
    for_training: bool = False,
    beyond_context: bool = False,
) -> Calibration:
    """Tokenize the beginning of `files` for `model`.

    Args:
        length: largest length of a sequence; by default 256, or the model's context if that is shorter.
        tokens: largest number of tokens in all sequences together.
        for_training: a repair follows, so there must be enough text for it, too.
        beyond_context: `length` may exceed the model's context.
    """
    if model.main_input_name != "input_ids":
        raise InputError(
            f"calibration text needs a model that reads text; {type(model).__name__} reads {model.main_input_name}. Leave "
            "--text out."
        )
    length = _length(model, tokenizer, length, beyond_context)
    pieces = _pieces(files)
    sequences = _packed(tokenizer, pieces, length, tokens) if is_causal_lm(model) else _lines(tokenizer, pieces, length, tokens)
    count = max(_MIN_SEQUENCES, math.ceil(_EVALUATION_SHARE * len(sequences)))
    evaluation, training = sequences[:count], sequences[count:]
    _require_enough(evaluation, training if for_training else None, length, batch)
    batches = [
        [_stacked(model, tokenizer, part[i : i + batch]) for i in range(0, len(part), batch)] for part in (evaluation, training)
    ]
    return Calibration(*batches)


def _length(model: PreTrainedModel, tokenizer: Any, asked: int | None, beyond_context: bool) -> int:
    limits = (context_of(model.config), tokenizer.model_max_length)
    context = min((limit for limit in limits if limit is not None), default=LENGTH)
    if asked is None:
        return min(LENGTH, context)
    if asked < 2 or (asked > context and not beyond_context):
        raise InputError(
            f"the length of a calibration sequence must be from 2 to the context of the model, {context}; got {asked}. If the "
            "positions of the model reach further, pass --beyond-context."
        )
    return asked


def _pieces(files: Sequence[Path]) -> Iterator[str]:
    """The texts one after the other, in pieces that end at a line break."""
    for path in files:
        if path.is_dir():
            raise InputError(f"calibration text must be a file, plain, .xz or .gz; got the folder {path}. Pass a file in it.")
        try:
            text = read_bytes(path).decode()
        except UnicodeDecodeError as error:
            raise InputError(f"calibration text must be UTF-8; got {path}: {error}. Save it as UTF-8.") from error
        while text:
            end = text.find("\n", _PIECE) + 1 or len(text)
            yield text[:end]
            text = text[end:]


def _packed(tokenizer: Any, pieces: Iterator[str], length: int, max_tokens: int) -> list[Tensor]:
    ids: list[int] = []
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    own = length - len(first)
    count = max_tokens // length  # whole sequences
    for piece in pieces:
        ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= count * own:
            break
    return [torch.tensor(first + ids[i * own : (i + 1) * own]) for i in range(min(count, len(ids) // own))]


def _lines(tokenizer: Any, pieces: Iterator[str], length: int, max_tokens: int) -> list[Tensor]:
    found: list[Tensor] = []
    for line in (line.strip() for piece in pieces for line in piece.splitlines()):
        if line:
            ids = tokenizer(line, truncation=True, max_length=length)["input_ids"]
            if (max_tokens := max_tokens - len(ids)) < 0:
                break
            found.append(torch.tensor(ids))
    return found


def _stacked(model: PreTrainedModel, tokenizer: Any, sequences: Sequence[Tensor]) -> Batch:
    """Sequences of a causal model, which have one length; others are padded at the end, with a mask."""
    if is_causal_lm(model):
        return {"input_ids": torch.stack(list(sequences))}
    ids = pad_sequence(list(sequences), batch_first=True, padding_value=tokenizer.pad_token_id or 0)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    batch = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
    if model.config.is_encoder_decoder:  # the decoder reads the same text
        start = torch.full_like(ids[:, :1], model.config.decoder_start_token_id)
        batch["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], 1)
    return batch


def _require_enough(evaluation: Sequence[Tensor], training: Sequence[Tensor] | None, length: int, batch: int) -> None:
    found = sum(map(len, evaluation))
    if len(evaluation) < _MIN_SEQUENCES or found < MIN_TOKENS:
        raise InputError(
            f"a conversion is measured on at least {_MIN_SEQUENCES} sequences and {MIN_TOKENS} tokens; the text has "
            f"{len(evaluation)} sequences of up to {length} tokens, {found} tokens in all. Pass more text, or a smaller "
            "--length."
        )
    if training is not None and len(training) <= batch:
        raise InputError(
            f"a repair needs at least two batches of {batch} sequences; besides the {len(evaluation)} held out for evaluation, "
            f"the text "
            f"has {len(training)} of up to {length} tokens. Pass more text, a larger --tokens, or a smaller --length "
            "or --batch."
        )
