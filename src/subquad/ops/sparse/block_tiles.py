"""The tiles of windows, of blocks and of the ends of blocks, for a sequence of a given length."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.ops.tiles import Tile, additive_mask


def window_tiles(
    most_before: int | None,
    most_after: int | None,
    without_self: bool,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tile, ...]:
    """Blocks of queries, each with the keys from `before` its first query to `after` its last one; None: all."""
    before, after = (length - 1 if most is None else min(most, length - 1) for most in (most_before, most_after))
    if not without_self and before == length - 1 and after in (0, length - 1):
        return (Tile(0, length, 1, 0, 0, length, is_causal=after == 0 and length > 1),)
    rows = min(_rows_per_block(before + after), length)
    offset = torch.arange(rows + before + after, device=device) - torch.arange(rows, device=device)[:, None]  # j - i + before
    allowed = (offset >= 0) & (offset <= before + after)
    if without_self:
        allowed &= offset != before
    return sliding_blocks(rows, before, after, length, additive_mask(allowed, dtype))


def _rows_per_block(width: int) -> int:
    """PyTorch's kernel takes 64 rows at a time from 192 on, 32 below; longer blocks read more keys that are masked."""
    return 192 if width >= 384 else 64


def sliding_blocks(rows: int, before: int, after: int, length: int, mask: Tensor | None) -> tuple[Tile, ...]:
    """Blocks of `rows` queries, each with the keys from `before` its first to `after` its last, as far as they exist.

    `mask` (rows, before + rows + after) is that of a block whose keys all exist. These blocks are one tile.
    """
    starts = range(0, length, rows)
    middle = [s for s in starts if s >= before and s + rows + after <= length]
    found = []
    for start in starts:
        if middle and middle[0] < start <= middle[-1]:
            continue
        is_middle = bool(middle) and start == middle[0]
        count, height = (len(middle), rows) if is_middle else (1, min(rows, length - start))
        first, last = max(start - before, 0), min(start + rows + after, length)
        cut = None
        if mask is not None:
            cut = mask[:height, first - start + before : last - start + before][None, None]
        found.append(Tile(start, height, count, first, rows, last - first, cut))
    return tuple(found)
