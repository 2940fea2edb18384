"""Rows of tensors, gathered and summed by index, and the pieces in which large results are computed.

B batch, H heads, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Numbers computed at a time: few enough to stay in cache, enough for operations to outweigh the overhead of calls.
_PIECE = 2**19


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, H, n, D) at index (B, H, m): (B, H, m, D)."""
    return x.flatten(0, 2).index_select(0, _flat_index(index, x.shape[2])).view(*index.shape, x.shape[-1])


def sum_rows(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Rows of x (B, H, m, D) summed by index (B, H, m), which is below `count`: (B, H, count, D)."""
    batch, heads, _, dim = x.shape
    sums = x.new_zeros(batch * heads * count, dim).index_add(0, _flat_index(index, count), x.flatten(0, 2))
    return sums.view(batch, heads, count, dim)


def _flat_index(index: Tensor, count: int) -> Tensor:
    """Index (B, H, m) into `count` rows of each head, as one into all B H count rows."""
    batch, heads, _ = index.shape
    start = torch.arange(batch * heads, device=index.device) * count
    return (index + start.view(batch, heads, 1)).flatten()


def piece_lengths(length: int, row: int, at_once: bool) -> list[int]:
    """The lengths of pieces of about `_PIECE` numbers, `row` numbers per step; a single piece if `at_once` or compiled."""
    piece = length if at_once or torch.compiler.is_compiling() else max(_PIECE // max(row, 1), 1)
    return [min(piece, length - start) for start in range(0, length, piece)]
