"""Checks of the inputs of models, besides those of attention itself."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.errors import InputError
from subquad.models.cache import SubquadCache

IGNORED = -100  # the label of tokens that the loss ignores


def tokens(name: str, ids: Tensor | None, embeds: Tensor | None, vocab_size: int | None) -> None:
    """Require exactly one of ids (B, N) in the vocabulary and embeddings (B, N, dim)."""
    if (ids is None) == (embeds is None):
        other = name.replace("input_ids", "inputs_embeds")
        raise InputError(f"pass exactly one of {name} and {other}; got {'neither' if ids is None else 'both'}.")
    if ids is not None:
        vocabulary(name, ids, vocab_size)


def vocabulary(name: str, ids: Tensor, vocab_size: int | None, *, ignored: int | None = None) -> None:
    """Require integer ids (B, N) below `vocab_size`, or equal to `ignored`."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2:
        came = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"{name} must be token ids of int32 or int64, (batch, length); got {came}.")
    if vocab_size is None:
        raise InputError(f"this model has vocab_size=None and reads no tokens; got {name}. Pass embeddings.")
    if not ids.numel() or not _is_readable(ids):
        return
    outside = (ids < 0) | (ids >= vocab_size)
    if ignored is not None:
        outside &= ids != ignored
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        hint = "Is it the tokenizer of this model?" if ignored is None else f"Use {ignored} for tokens that are not predicted."
        raise InputError(
            f"{name} must lie in the vocabulary, 0 to {vocab_size - 1}; got {int(ids[row, column])} in row {row}, column "
            f"{column}. {hint}"
        )


def targets(labels: Tensor, like: Tensor, vocab_size: int | None) -> Tensor:
    """Labels in the vocabulary, or -100, one for each token of `like` (B, N, ...); as int64, which the loss needs."""
    vocabulary("labels", labels, vocab_size, ignored=IGNORED)
    if labels.shape != like.shape[:2]:
        raise InputError(f"labels must be (batch, tokens) = {tuple(like.shape[:2])}; got {tuple(labels.shape)}.")
    return labels.long()


def classes(labels: Tensor, logits: Tensor, problem_type: str | None) -> Tensor:
    """Labels that fit logits (..., L): classes below L, or -100; for regression or several labels, the shape of the logits."""
    count = logits.shape[-1]
    if not isinstance(labels, Tensor):
        raise InputError(f"labels must be a tensor; got {type(labels).__name__}.")
    is_class = problem_type == "single_label_classification" or (
        problem_type is None and count > 1 and not labels.is_floating_point()
    )
    if not is_class:
        if labels.shape not in (logits.shape, logits.shape[: labels.dim()] if count == 1 else logits.shape):
            raise InputError(f"labels must have the shape of the logits, {tuple(logits.shape)}; got {tuple(labels.shape)}.")
        return labels.to(logits.dtype)
    if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
        came = f"{tuple(labels.shape)} {labels.dtype}"
        raise InputError(f"labels must be integer classes, {tuple(logits.shape[:-1])}; got {came}.")
    if _is_readable(labels) and bool(((labels != IGNORED) & ((labels < 0) | (labels >= count))).any()):
        raise InputError(
            f"labels must be classes from 0 to {count - 1}, or {IGNORED} to be ignored; got values from {labels.min()} to "
            f"{labels.max()}. Set num_labels."
        )
    return labels.long()


def padding(
    name: str, mask: Tensor | None, shape: tuple[int, int], past: int = 0, counted: Tensor | None = None
) -> Tensor | None:
    """The mask of the new tokens as bool; None if all are real. `mask` is (B, past + N), 1 or True for real tokens.

    `counted` (B,) is the number of real tokens in the cache.
    """
    if mask is None:
        return None
    expected = (shape[0], past + shape[1])
    if not isinstance(mask, Tensor) or tuple(mask.shape) != expected:
        came = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        behind = f", {past} of which are in the cache" if past else ""
        raise InputError(f"{name} must be (batch, tokens) = {expected}{behind}; got {came}.")
    if mask.is_floating_point() or mask.is_complex():
        raise InputError(f"{name} must be bool or integer, 1 for real tokens and 0 for pads; got {mask.dtype}.")
    if not _is_readable(mask):
        return mask[:, past:].bool()
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise InputError(f"{name} must hold 1 for real tokens and 0 for pads; got values from {mask.min()} to {mask.max()}.")
    if counted is not None and bool((differs := mask[:, :past].sum(1) != counted).any()):
        row = int(differs.nonzero()[0])
        raise InputError(
            f"{name} must have the same pads for past tokens as before; row {row} has {int(counted[row])} real tokens in the "
            f"cache, and {int(mask[row, :past].sum())} here."
        )
    mask = mask[:, past:]
    return None if bool(mask.all()) else mask.bool()


def cache(past: object, layers: int, is_decoder: bool, use_cache: bool | None) -> None:
    """Require a cache of this model, and only for a decoder."""
    if past is None and not use_cache:
        return
    if not is_decoder:
        raise InputError(
            "only a causal model has a cache, and this one is bidirectional. Leave past_key_values and use_cache out."
        )
    if past is not None and not isinstance(past, SubquadCache):
        raise InputError(
            f"past_key_values must be a SubquadCache, as SubquadCache(model.config) makes one; got {type(past).__name__}."
        )
    if past is not None and len(past) != layers:
        raise InputError(f"past_key_values must have one layer for each of the model's {layers}; got {len(past)}.")


def _is_readable(x: Tensor) -> bool:
    return not x.is_meta and not torch.compiler.is_compiling() and type(x) is Tensor
