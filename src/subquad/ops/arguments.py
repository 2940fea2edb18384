"""Checks of an operator's arguments. Anybody may call an operator, and kernels read memory: the tensors must fit together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.errors import InputError


def require_shape(x: Tensor, name: str, shape: Sequence[int]) -> None:
    if tuple(x.shape) != tuple(shape):
        raise InputError(f"{name} must have the shape {tuple(shape)}, to fit the others; got {tuple(x.shape)}.")


def require_dtype(x: Tensor, name: str, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise InputError(f"{name} must have the dtype {dtype}; got {x.dtype}.")


def require_range(x: Tensor, name: str, least: int, most: int) -> None:
    """Indices from `least` to `most`."""
    if x.numel() and not least <= int(x.min()) <= int(x.max()) <= most:
        raise InputError(f"{name} must be in {least} to {most}; got {int(x.min())} to {int(x.max())}.")


def require_heads(**tensors: Tensor) -> None:
    """Tensors (B, heads, tokens, channels) of one floating-point dtype."""
    names, dtypes = ", ".join(tensors), {x.dtype for x in tensors.values()}
    for x in tensors.values():
        if x.dim() != 4:
            raise InputError(f"{names} must have 4 dimensions; got {tuple(x.shape)}.")
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        raise InputError(f"{names} must have the same floating-point dtype; got {', '.join(map(str, dtypes))}.")


def require_groups(heads: int, kv_heads: int) -> None:
    if not kv_heads or heads % kv_heads:
        raise InputError(f"the number of key-value heads must divide that of query heads; got {kv_heads} and {heads}.")
