"""Segment means: the mean of p consecutive keys, and of their values, stands for all of them.

When causal, a query sees the segments that end before it.

B batch, K key-value heads, n tokens, p tokens per segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.sparse.key_sets import KeySet, are_counts
from subquad.ops.sparse.tokens import Tokens
from subquad.ops.tiles.group import Tile, TileGroup, additive_mask, pad_to

_ROWS = 256  # queries per block, rounded up to whole segments


@dataclass(frozen=True)
class SegmentMeans(KeySet):
    """The means of `size` consecutive keys and values; `is_causal` leaves out segments that do not end before the query."""

    size: int
    is_causal: bool

    @property
    def is_valid(self) -> bool:
        return are_counts(self.size, least=1)

    def tile_groups(self, x: Tokens) -> list[TileGroup]:
        if self.size > x.length:  # a single segment, which ends before no query
            return [] if self.is_causal else SegmentMeans(x.length, False).tile_groups(x)
        key, value, bias = self._means(x)
        if not self.is_causal:
            return [x.tile_group_with(key, value, bias=bias)]
        # A block of queries sees all segments before it, and some of those inside it.
        block = self.size * -(-_ROWS // self.size)
        inside = block // self.size
        i, s = torch.arange(block, device=key.device)[:, None], torch.arange(inside, device=key.device)
        mask = additive_mask(s < i // self.size, key.dtype)[None, None]
        whole, tail = x.length // block, x.length % block
        near = [Tile(0, block, whole, 0, inside, inside, mask)] if whole else []
        left = key.shape[2] - whole * inside
        near += [Tile(whole * block, tail, 1, whole * inside, 0, left, mask[:, :, :tail, :left])] if tail else []
        far = [Tile(a, min(block, x.length - a), 1, 0, 0, a // self.size) for a in range(0, x.length, block)]
        return [x.tile_group_with(key, value, tuple(near), bias), x.tile_group_with(key, value, tuple(far), bias)]

    def _means(self, x: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        """Means (B, K, segments, ...) over the keys that are not masked, and their bias, which masks segments without any."""
        missing = -x.length % self.size
        key, value, real = x.real_first()
        key, value = (pad_to(t, x.length + missing, -2).unflatten(2, (-1, self.size)) for t in (key, value))
        if real is None:
            count = torch.full((key.shape[2], 1), self.size, dtype=key.dtype, device=key.device)
            count[-1] -= missing
            return key.sum(3) / count, value.sum(3) / count, None
        real = F.pad(real, (0, missing)).unflatten(1, (-1, self.size))  # (B or 1, segments, p)
        count = real.sum(2)  # (B or 1, segments)
        key, value = (
            t.masked_fill(~real[:, None, ..., None], 0).sum(3) / count.clamp(min=1)[:, None, :, None] for t in (key, value)
        )
        return key, value, additive_mask(count > 0, key.dtype)

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        return torch.zeros_like(j, dtype=torch.bool)  # means only, no single tokens

    def seen_later(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        return j // self.size >= now // self.size

    def max_seen_later(self, now: int, heads: int) -> int:
        return self.size
