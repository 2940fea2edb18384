"""Calibration text: files as batches of token ids, of which some judge a conversion and the others repair it.

A causal model reads the whole text as one stream, cut into sequences of one length, each behind the tokenizer's BOS. Another
model reads every line as a sequence of its own, with the tokenizer's special tokens, padded.
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
from subquad.conversion.diagnosis import LEAST, tokens_of
from subquad.conversion.pretrained import context_of
from subquad.errors import InputError
from subquad.tasks.source import read_bytes

LENGTH = 256  # tokens of a sequence, unless the model was made for fewer
_SHARE, _FEW = 0.1, 4  # of the sequences that judge, and how many there are at least
_PIECE = 200_000  # characters that are read at a time

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Calibration:
    """What judges a conversion, and what it may learn from: never the same."""

    judged: list[Batch]
    learnt: list[Batch]

    @property
    def tokens(self) -> int:
        return sum(tokens_of(batch) for batch in (*self.judged, *self.learnt))

    def fingerprint(self) -> str:
        """The same for the same tokens in the same batches."""
        digest = hashlib.sha256()
        for batch in (*self.judged, *self.learnt):
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
    is_learnt: bool = False,
    is_beyond_allowed: bool = False,
) -> Calibration:
    """The beginning of `files`, for `model`.

    Args:
        length: tokens of a sequence, at most; by default 256, or the model's context if that is less.
        tokens: of all sequences together, at most.
        is_learnt: a model will be repaired: there must be enough for that, too.
        is_beyond_allowed: `length` may be beyond the model's context.
    """
    if model.main_input_name != "input_ids":
        raise InputError(
            f"calibration text is for models that read text; {type(model).__name__} reads {model.main_input_name}."
        )
    length = _length(model, tokenizer, length, is_beyond_allowed)
    pieces = _pieces(files)
    sequences = _packed(tokenizer, pieces, length, tokens) if is_causal_lm(model) else _lines(tokenizer, pieces, length, tokens)
    count = max(_FEW, math.ceil(_SHARE * len(sequences)))
    judged, learnt = sequences[:count], sequences[count:]
    _require_enough(judged, learnt if is_learnt else None, length, batch)
    batches = [
        [_stacked(model, tokenizer, part[i : i + batch]) for i in range(0, len(part), batch)] for part in (judged, learnt)
    ]
    return Calibration(*batches)


def _length(model: PreTrainedModel, tokenizer: Any, asked: int | None, is_beyond_allowed: bool) -> int:
    limits = (context_of(model.config), tokenizer.model_max_length)
    context = min((limit for limit in limits if limit is not None), default=LENGTH)
    if asked is None:
        return min(LENGTH, context)
    if asked < 2 or (asked > context and not is_beyond_allowed):
        raise InputError(
            f"a calibration sequence has from 2 tokens to as many as the model was made for, {context}; got {asked}. "
            "Where its positions reach further, --beyond-context allows it."
        )
    return asked


def _pieces(files: Sequence[Path]) -> Iterator[str]:
    """The texts one after the other, in parts that end where lines do."""
    for path in files:
        if path.is_dir():
            raise InputError(f"calibration text is a file, plain or .xz or .gz; got the folder {path}. Pass a file in it.")
        try:
            text = read_bytes(path).decode()
        except UnicodeDecodeError as error:
            raise InputError(f"calibration text is UTF-8; got {path}, with {error}. Save it as UTF-8.") from error
        while text:
            end = text.find("\n", _PIECE) + 1 or len(text)
            yield text[:end]
            text = text[end:]


def _packed(tokenizer: Any, pieces: Iterator[str], length: int, most: int) -> list[Tensor]:
    ids: list[int] = []
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    own = length - len(first)
    count = most // length  # whole sequences
    for piece in pieces:
        ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= count * own:
            break
    return [torch.tensor(first + ids[i * own : (i + 1) * own]) for i in range(min(count, len(ids) // own))]


def _lines(tokenizer: Any, pieces: Iterator[str], length: int, most: int) -> list[Tensor]:
    found: list[Tensor] = []
    for line in (line.strip() for piece in pieces for line in piece.splitlines()):
        if line:
            ids = tokenizer(line, truncation=True, max_length=length)["input_ids"]
            if (most := most - len(ids)) < 0:
                break
            found.append(torch.tensor(ids))
    return found


def _stacked(model: PreTrainedModel, tokenizer: Any, sequences: Sequence[Tensor]) -> Batch:
    """Sequences of a causal model as they are; others padded behind, with a mask."""
    if is_causal_lm(model):
        return {"input_ids": torch.stack(list(sequences))}
    ids = pad_sequence(list(sequences), batch_first=True, padding_value=tokenizer.pad_token_id or 0)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    batch = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
    if model.config.is_encoder_decoder:  # whose decoder reads the same text
        start = torch.full_like(ids[:, :1], model.config.decoder_start_token_id)
        batch["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], 1)
    return batch


def _require_enough(judged: Sequence[Tensor], learnt: Sequence[Tensor] | None, length: int, batch: int) -> None:
    found = sum(map(len, judged))
    if len(judged) < _FEW or found < LEAST:
        raise InputError(
            f"a conversion is judged by at least {_FEW} sequences with {LEAST} tokens; the text has {len(judged)} of up to "
            f"{length}, with {found}. Pass more text, or a smaller --length."
        )
    if learnt is not None and len(learnt) <= batch:
        raise InputError(
            f"a repair learns from at least two batches of {batch} sequences; beside the {len(judged)} that judge, the text "
            f"has {len(learnt)} of up to {length} tokens. Pass more text, a larger --tokens, or a smaller --length or --batch."
        )
