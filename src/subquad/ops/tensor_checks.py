"""Checks of what an operator gets: anybody may call it, and kernels read memory, so the tensors must fit together."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.errors import InputError


def require(x: Tensor | None, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    """Raise an error unless `x` is None or has this shape and, if there is one, this dtype."""
    if x is None or (tuple(x.shape) == tuple(shape) and dtype in (None, x.dtype)):
        return
    wanted = f"the shape {tuple(shape)}" + ("" if dtype is None else f" and the dtype {dtype}")
    raise InputError(f"{name} must have {wanted}, to fit the others; got {tuple(x.shape)} and {x.dtype}.")


def require_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise an error unless these are (B, H, n, D), (B, K, n, D) and (B, K, n, E) of one dtype, and K divides H."""
    for x in (query, key, value):
        if x.dim() != 4:
            raise InputError(f"query, key and value must have 4 dimensions; got {tuple(x.shape)}.")
    (batch, heads, length, channels), kv_heads = query.shape, key.shape[1]
    if not kv_heads or heads % kv_heads:
        raise InputError(f"the number of key-value heads must divide that of query heads; got {kv_heads} and {heads}.")
    require(key, "key", (batch, kv_heads, length, channels), query.dtype)
    require(value, "value", (batch, kv_heads, length, value.shape[3]), query.dtype)
