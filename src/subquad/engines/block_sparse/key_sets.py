"""The sets of keys that sparse patterns are made of.

A set knows three things: the tiles that compute it for a whole sequence; whether query i sees key j, for decoding; and which
keys later queries may still see, so that a decode state can drop the others. Tiles are cached by shape.

B batch, H query heads, K key-value heads, G = H / K query heads per key-value head, n tokens, D channels, E value channels, C
tokens per block, r selected blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.precision import upcast
from subquad.ops.sparse.block_tiles import sliding_blocks, window_tiles
from subquad.ops.tiles import MASKED, Tile, TileGroup, additive_mask


@dataclass(frozen=True, eq=False)
class Tokens:
    """Queries (B, K, G, n, D), keys (B, K, n, D) and values (B, K, n, E), in float32 or a higher precision.

    `bias` (B or 1, n) is 0, or `MASKED` for keys that no query may see; None: all may be seen.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tokens:
        """From query (B, H, n, D), key (B, K, n, D), value (B, K, n, E); `allowed` (B, n) marks the keys that may be seen."""
        query, key, value = (upcast(x) for x in (query, key, value))
        bias = None if allowed is None else additive_mask(allowed, key.dtype)
        return Tokens(query.unflatten(1, (key.shape[1], -1)), key, value, bias)

    @property
    def length(self) -> int:
        return self.query.shape[3]

    def tile_group(self, tiles: tuple[Tile, ...]) -> TileGroup:
        """Tiles over these queries and keys."""
        return self.tile_group_with(self.key, self.value, tiles, self.bias)

    def tile_group_with(
        self, key: Tensor, value: Tensor, tiles: tuple[Tile, ...] | None = None, bias: Tensor | None = None
    ) -> TileGroup:
        """Tiles over these queries and other keys and values (B, K, m, ...), by default all pairs; `bias` is (B or 1, m)."""
        all_pairs = Tile(0, self.length, 1, 0, 0, key.shape[2])
        query, key, value = (x.flatten(0, 1).unsqueeze(1) for x in (self.query, key, value))
        bias = None if bias is None else self.repeat_per_head(bias).unsqueeze(1)
        return TileGroup(query, key, value, tiles or (all_pairs,), bias=bias)

    def repeat_per_head(self, x: Tensor) -> Tensor:
        """x (B, ...) as (B K, ...); (1, ...) stays as it is."""
        return x if x.shape[0] == 1 else x.repeat_interleave(self.key.shape[1], dim=0)


class KeySet(ABC):
    """Keys that a query sees, by their positions."""

    @abstractmethod
    def tile_groups(self, x: Tokens) -> list[TileGroup]:
        """The tiles that compute it."""

    @abstractmethod
    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        """Whether queries at i see keys at j <= i; i, j and the query heads broadcast."""

    @abstractmethod
    def seen_later(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        """Whether any query at `now` or later may see the key at j; j, now and the query heads broadcast."""

    @abstractmethod
    def max_seen_later(self, now: int, heads: int) -> int:
        """For how many keys before `now` that holds at most, `heads` query heads taken together."""


@dataclass(frozen=True)
class Window(KeySet):
    """Keys up to `before` steps before the query and `after` steps after it (None: all); a step is `dilation` tokens.

    `without_self` leaves the query's own key out.
    """

    before: int | None
    after: int | None
    dilation: int = 1
    without_self: bool = False

    def tile_groups(self, x: Tokens) -> list[TileGroup]:
        if self.dilation == 1:
            return [x.tile_group(_cached(_tiles_of_window, x, self, x.length))]
        # Viewed as (steps, dilation), the tokens of one column are consecutive steps.
        dilation = min(self.dilation, x.length)
        steps = -(-x.length // dilation)
        total = steps * dilation
        query, key, value = (pad_to(t, total, -2).unflatten(-2, (steps, dilation)) for t in (x.query, x.key, x.value))
        query = query.movedim(4, 2).flatten(0, 1)  # (B K, dilation, G, steps, D)
        key, value = (t.transpose(2, 3).flatten(0, 1) for t in (key, value))  # (B K, dilation, steps, ...)
        token = torch.arange(total, device=query.device).reshape(steps, dilation).T  # (dilation, steps)
        bias = None if x.bias is None else x.repeat_per_head(x.bias)
        if total > x.length:
            bias = F.pad(key.new_zeros(1, x.length) if bias is None else bias, (0, total - x.length), value=MASKED)
        bias = None if bias is None else bias.unflatten(1, (steps, dilation)).mT
        tiles = _cached(_tiles_of_window, x, self, steps)
        return [TileGroup(query, key, value, tiles, token.reshape(1, total).clamp(max=x.length), bias)]

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        seen = (i - j) % self.dilation == 0
        if self.before is not None:
            seen = seen & (i - j <= self.before * self.dilation)
        return seen & (i != j) if self.without_self else seen

    def seen_later(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        return j >= (torch.zeros_like(now) if self.before is None else now - self.before * self.dilation)

    def max_seen_later(self, now: int, heads: int) -> int:
        return now if self.before is None else self.before * self.dilation


@dataclass(frozen=True)
class Blocks(KeySet):
    """All keys of the query's own block of C tokens, of `before` blocks before it and of `after` blocks after it.

    `is_causal` leaves out later keys. `ends` leaves only the last `ends` keys of each block, and the query's own key.
    """

    size: int
    before: int = 0
    after: int = 0
    is_causal: bool = False
    ends: int | None = None

    def tile_groups(self, x: Tokens) -> list[TileGroup]:
        return [x.tile_group(_cached(_block_tiles, x, self, x.length))]

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        seen = i // self.size - j // self.size <= self.before
        return seen if self.ends is None else seen & ((j % self.size >= self.size - self.ends) | (i == j))

    def seen_later(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        return j // self.size >= now // self.size - self.before

    def max_seen_later(self, now: int, heads: int) -> int:
        return self.size * (self.before + 1)


@dataclass(frozen=True)
class BlockEnds(KeySet):
    """The last `count` keys of every block of C tokens except the query's own; `is_causal` leaves out later blocks."""

    size: int
    count: int
    is_causal: bool

    def tile_groups(self, x: Tokens) -> list[TileGroup]:
        if self.size >= x.length:  # a single block, the query's own
            return []
        index = _end_positions(x.length, self.size, self.count, x.key.device)
        key, value = (t.index_select(2, index) for t in (x.key, x.value))
        bias = None if x.bias is None else x.bias.index_select(1, index)
        return [x.tile_group_with(key, value, _cached(_end_tiles, x, self, x.length), bias)]

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        return (j % self.size >= self.size - self.count) & (i // self.size != j // self.size)

    def seen_later(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        return (j % self.size >= self.size - self.count).expand(torch.broadcast_shapes(j.shape, now.shape))

    def max_seen_later(self, now: int, heads: int) -> int:
        return self.count * -(-now // self.size)


@dataclass(frozen=True, eq=False)
class SelectedBlocks(KeySet):
    """Any blocks of C keys, r for each head and each block of queries.

    `select` maps blocks of queries and heads, which broadcast, to the numbers (..., r) of their blocks of keys, -1 for none.
    `index` (B or 1, H, blocks, r) holds those of a whole sequence. From one block of queries to the next, blocks may be
    dropped, and blocks that lie more than `before` blocks back may be added, but never one that was dropped earlier.
    """

    size: int
    count: int
    before: int
    index: Tensor
    select: Callable[[Tensor, Tensor], Tensor]

    def tile_groups(self, x: Tokens) -> list[TileGroup]:
        columns, whole, tail = self.index.shape[-1] * self.size, x.length // self.size, x.length % self.size
        starts = torch.where(self.index < 0, -1, self.index * self.size).expand(len(x.key), -1, -1, -1).flatten(0, 1)
        tiles = [Tile(0, self.size, whole, 0, 0, columns, run_starts=starts[:, :whole])] if whole else []
        tiles += [Tile(whole * self.size, tail, 1, 0, 0, columns, run_starts=starts[:, whole:])] if tail else []
        return [x.tile_group(tuple(tiles))]

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        return (self.select(i // self.size, heads) == (j // self.size).unsqueeze(-1)).any(-1)

    def seen_later(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        block = now // self.size
        selected = (self.select(block, heads) == (j // self.size).unsqueeze(-1)).any(-1)
        return selected | (j // self.size >= block - self.before)

    def max_seen_later(self, now: int, heads: int) -> int:
        return self.size * (self.count * heads + self.before + 1)


def pad_to(x: Tensor, size: int, dim: int) -> Tensor:
    """x with zeros appended to make dimension -1 or -2 as large as `size`; unlike F.pad, no copy where none are needed."""
    missing = size - x.shape[dim]
    return F.pad(x, (0, 0) * (-1 - dim) + (0, missing)) if missing else x


def _cached(build: Callable[..., tuple[Tile, ...]], x: Tokens, key_set: KeySet, length: int) -> tuple[Tile, ...]:
    """The tiles for a length, built once; those of a traced call or of fake tensors are not cached."""
    is_cached = type(x.query) is Tensor and not torch.compiler.is_compiling()
    return (_build_once if is_cached else _build)(build, key_set, length, x.query.dtype, x.query.device)


def _build(build: Callable[..., tuple[Tile, ...]], *arguments: object) -> tuple[Tile, ...]:
    return build(*arguments)


# A mask that was made in inference mode could not be saved for a backward pass later.
_build_once = lru_cache(maxsize=768)(torch.inference_mode(False)(_build))


def _tiles_of_window(window: Window, *rest: Any) -> tuple[Tile, ...]:
    return window_tiles(window.before, window.after, window.without_self, *rest)


def _block_tiles(blocks: Blocks, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tile, ...]:
    size = min(blocks.size, length)
    others = -(-length // size) - 1  # as many blocks are there besides the query's own
    before, after = min(blocks.before, others) * size, min(blocks.after, others) * size
    mask = None
    if blocks.is_causal or blocks.ends is not None:
        i = torch.arange(size, device=device)[:, None] + before
        j = torch.arange(before + size + after, device=device)
        allowed = torch.ones(size, len(j), dtype=torch.bool, device=device)
        if blocks.is_causal:
            allowed &= i >= j
        if blocks.ends is not None:
            allowed &= (j % size >= blocks.size - blocks.ends) | (i == j)
        mask = additive_mask(allowed, dtype)
    return sliding_blocks(size, before, after, length, mask)


def _end_tiles(ends: BlockEnds, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tile, ...]:
    size, whole, tail = ends.size, length // ends.size, length % ends.size
    block = _end_positions(length, size, ends.count, device) // size
    query = torch.arange(whole + (tail > 0), device=device)[:, None]
    mask = additive_mask(block < query if ends.is_causal else block != query, dtype)[None, :, None]  # (1, blocks, 1, ends)
    found = [Tile(0, size, whole, 0, 0, len(block), mask[:, :whole])] if whole else []
    found += [Tile(whole * size, tail, 1, 0, 0, len(block), mask[:, whole:])] if tail else []
    return tuple(found)


def _end_positions(length: int, size: int, count: int, device: torch.device) -> Tensor:
    """The positions of the last `count` tokens of every block, as far as they exist."""
    blocks = torch.arange(-(-length // size), device=device)[:, None] * size
    number = length // size * count + max(0, length % size - (size - count))
    return (blocks + torch.arange(size - count, size, device=device)).flatten()[:number]
