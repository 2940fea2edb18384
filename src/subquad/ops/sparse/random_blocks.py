"""Random blocks of keys: the set of keys that `random_draw` draws.

B batch, H query heads, C tokens per block, r selected blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from subquad.ops.sparse.key_sets import KeySet, are_counts
from subquad.ops.sparse.random_draw import draw_blocks, reservoir_samples
from subquad.ops.sparse.tokens import Tokens
from subquad.ops.tiles.group import Tile, TileGroup


@dataclass(frozen=True)
class RandomBlocks(KeySet):
    """`count` blocks of C keys for each head and each block of queries, outside of its window and not global.

    The window has `side` blocks on each side; `first` and `last` blocks are global. When causal, they are reservoir samples of
    the blocks before the window: from one block of queries to the next, blocks may be dropped, and blocks that lie more than
    `side` blocks back may be added, but never one that was dropped earlier.

    `select`, for decoding, maps blocks of queries and heads, which broadcast, to the numbers (..., r) of their blocks of keys,
    -1 for none.
    """

    size: int
    count: int
    side: int
    first: int
    last: int
    is_causal: bool
    select: Callable[[Tensor, Tensor], Tensor] | None = field(default=None, compare=False)

    @property
    def is_valid(self) -> bool:
        return are_counts(self.size, self.count, least=1) and are_counts(self.side, self.first, self.last)

    def tile_groups(self, x: Tokens) -> list[TileGroup]:
        if x.length <= self.size:  # a single block
            return []
        index = self._index(x)
        columns, whole, tail = index.shape[-1] * self.size, x.length // self.size, x.length % self.size
        starts = torch.where(index < 0, -1, index * self.size).expand(len(x.key), -1, -1, -1).flatten(0, 1)
        tiles = [Tile(0, self.size, whole, 0, 0, columns, run_starts=starts[:, :whole])] if whole else []
        tiles += [Tile(whole * self.size, tail, 1, 0, 0, columns, run_starts=starts[:, whole:])] if tail else []
        return [x.tile_group(tuple(tiles))]

    def _index(self, x: Tokens) -> Tensor:
        """The blocks (B or 1, H, blocks, r) of a whole sequence."""
        assert x.draw is not None
        if self.is_causal or x.lengths is None:  # the same for all sequences
            return _draw_once(self, x.length, tuple(x.draw.tolist()), x.draw.device)
        return self.draw(x.length, x.draw, x.lengths)

    def draw(self, length: int, draw: Tensor, lengths: Tensor) -> Tensor:
        """The blocks (B or 1, H, blocks, r), for sequences of `lengths` (B or 1,) real tokens, at most `length`."""
        total = -(-length // self.size)
        block, heads = torch.arange(total, device=draw.device), torch.arange(len(draw), device=draw.device)[:, None]
        if self.is_causal:
            samples = reservoir_samples(draw, min(self.count, total), total)  # (H, total + 1, r)
            found = samples[heads, (block - self.side - self.first).clamp(0, total)]
            return torch.where(found < 0, -1, found + self.first)[None]
        blocks = (lengths[:, None, None] + self.size - 1) // self.size  # (B or 1, 1, 1)
        keys, ends = draw[heads], {"first": self.first, "last": self.last}
        return draw_blocks(keys, block, blocks, self.count, **ends, side=self.side, most=total)

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        assert self.select is not None
        return (self.select(i // self.size, heads) == (j // self.size).unsqueeze(-1)).any(-1)

    def seen_later(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        assert self.select is not None
        block = now // self.size
        selected = (self.select(block, heads) == (j // self.size).unsqueeze(-1)).any(-1)
        return selected | (j // self.size >= block - self.side)

    def max_seen_later(self, now: int, heads: int) -> int:
        return self.size * (self.count * heads + self.side + 1)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _draw_once(blocks: RandomBlocks, length: int, draw: tuple[int, ...], device: torch.device) -> Tensor:
    return blocks.draw(length, torch.tensor(draw, device=device), torch.tensor([length], device=device))
