"""Boolean masks. True = may attend, everywhere.

B batch, N queries, M keys. With a past, the N queries are the last N of the M keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """(N, M): each query attends to the keys up to its own; the last query has the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def zero_pads(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """`x` (B, H, M, D) with its pads set to 0, so that not even a NaN in them reaches a product."""
    if key_padding_mask is None:
        return x
    return x.masked_fill(~key_padding_mask[:, None, :, None], 0)


def real_first(key_padding_mask: Tensor) -> tuple[Tensor, Tensor]:
    """An order (B, M) that puts the real tokens of each row first, otherwise unchanged, and the mask in that order."""
    order = (~key_padding_mask).to(torch.int8).argsort(dim=1, stable=True)
    return order, key_padding_mask.gather(1, order)


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """The tokens `index` (B, m) of x (B, H, M, D)."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def put_back(x: Tensor, index: Tensor) -> Tensor:
    """The inverse of `take_tokens` with a permutation `index`."""
    return torch.zeros_like(x).scatter(2, index[:, None, :, None].expand_as(x), x)
