"""The tiles of windows, of blocks and of the ends of blocks, for a sequence of a given length."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.ops.tiles.group import Tile, additive_mask


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
    return _sliding_blocks(rows, before, after, length, additive_mask(allowed, dtype))


def _rows_per_block(width: int) -> int:
    """PyTorch's kernel takes 64 rows at a time from 192 on, 32 below; longer blocks read more keys that are masked."""
    return 192 if width >= 384 else 64


def block_tiles(
    whole_size: int,
    blocks_before: int,
    blocks_after: int,
    is_causal: bool,
    ends: int | None,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tile, ...]:
    """Blocks of queries with their own block of keys, and those before and after it; of all blocks only the `ends`."""
    size = min(whole_size, length)
    others = -(-length // size) - 1  # as many blocks are there besides the query's own
    before, after = min(blocks_before, others) * size, min(blocks_after, others) * size
    mask = None
    if is_causal or ends is not None:
        i = torch.arange(size, device=device)[:, None] + before
        j = torch.arange(before + size + after, device=device)
        allowed = torch.ones(size, len(j), dtype=torch.bool, device=device)
        if is_causal:
            allowed &= i >= j
        if ends is not None:
            allowed &= (j % size >= whole_size - ends) | (i == j)
        mask = additive_mask(allowed, dtype)
    return _sliding_blocks(size, before, after, length, mask)


def _sliding_blocks(rows: int, before: int, after: int, length: int, mask: Tensor | None) -> tuple[Tile, ...]:
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


def end_tiles(
    size: int, count: int, is_causal: bool, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tile, ...]:
    """Blocks of queries with the last `count` keys of the other blocks."""
    whole, tail = length // size, length % size
    block = end_positions(length, size, count, device) // size
    query = torch.arange(whole + (tail > 0), device=device)[:, None]
    mask = additive_mask(block < query if is_causal else block != query, dtype)[None, :, None]  # (1, blocks, 1, ends)
    found = [Tile(0, size, whole, 0, 0, len(block), mask[:, :whole])] if whole else []
    found += [Tile(whole * size, tail, 1, 0, 0, len(block), mask[:, whole:])] if tail else []
    return tuple(found)


def end_positions(length: int, size: int, count: int, device: torch.device) -> Tensor:
    """The positions of the last `count` tokens of every block, as far as they exist."""
    blocks = torch.arange(-(-length // size), device=device)[:, None] * size
    number = length // size * count + max(0, length % size - (size - count))
    return (blocks + torch.arange(size - count, size, device=device)).flatten()[:number]
