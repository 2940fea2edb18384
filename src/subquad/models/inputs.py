"""The rules that a model's inputs keep, beside those of attention itself."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.errors import InputError
from subquad.models.cache import SubquadCache


def tokens(name: str, ids: Tensor | None, embeds: Tensor | None, vocab_size: int | None) -> None:
    """Exactly one of ids (B, N) in the vocabulary and embeddings (B, N, dim)."""
    if (ids is None) == (embeds is None):
        other = name.replace("input_ids", "inputs_embeds")
        raise InputError(f"pass exactly one of {name} and {other}; got {'neither' if ids is None else 'both'}.")
    if ids is not None:
        vocabulary(name, ids, vocab_size)


def vocabulary(name: str, ids: Tensor, vocab_size: int | None, *, ignored: int | None = None) -> None:
    """Integer ids (B, N) from 0 to below `vocab_size`, or `ignored`."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2:
        came = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"{name} must be integer token ids, (batch, length); got {came}.")
    if vocab_size is None:
        raise InputError(f"this model has vocab_size=None and reads no tokens; got {name}. Pass embeddings.")
    if not ids.numel() or not _is_readable(ids):
        return
    outside = (ids < 0) | (ids >= vocab_size)
    if ignored is not None:
        outside &= ids != ignored
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        raise InputError(
            f"{name} must lie in the vocabulary, 0 to {vocab_size - 1}; got {int(ids[row, column])} in row {row}, place "
            f"{column}. Is the tokenizer the model's own?"
        )


def padding(name: str, mask: Tensor | None, shape: tuple[int, int], past: int) -> Tensor | None:
    """The mask of the last tokens as bool; None if all are real. `mask` is (B, past + N), 1 or True for real tokens."""
    if mask is None:
        return None
    expected = (shape[0], past + shape[1])
    if not isinstance(mask, Tensor) or tuple(mask.shape) != expected:
        came = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        behind = f", {past} of which are in the cache" if past else ""
        raise InputError(f"{name} must be (batch, tokens) = {expected}{behind}; got {came}.")
    if mask.is_floating_point() or mask.is_complex():
        raise InputError(f"{name} must be bool or integer, 1 for real tokens and 0 for pads; got {mask.dtype}.")
    mask = mask[:, past:]
    if not _is_readable(mask):
        return mask.bool()
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise InputError(f"{name} must hold 1 for real tokens and 0 for pads; got values from {mask.min()} to {mask.max()}.")
    return None if bool(mask.all()) else mask.bool()


def cache(past: object, layers: int, is_decoder: bool, use_cache: bool | None) -> None:
    """A cache of this model, and only for a decoder."""
    if past is None and not use_cache:
        return
    if not is_decoder:
        raise InputError(
            "a cache belongs to a causal model, and this one is bidirectional; leave past_key_values and use_cache out."
        )
    if past is not None and not isinstance(past, SubquadCache):
        raise InputError(
            f"past_key_values must be a SubquadCache, as SubquadCache(model.config) makes one; got {type(past).__name__}."
        )
    if past is not None and len(past) != layers:
        raise InputError(f"past_key_values must have one layer for each of the model's {layers}; got {len(past)}.")


def _is_readable(x: Tensor) -> bool:
    return not x.is_meta and not torch.compiler.is_compiling() and type(x) is Tensor
