"""The sets of keys that sparse patterns are made of.

A set knows three things: the tiles that compute it for a whole sequence; whether query i sees key j, for decoding; and which
keys later queries may still see, so that a decode state can drop the others. Tiles are cached by shape.

B batch, H query heads, K key-value heads, G = H / K query heads per key-value head, n tokens, C tokens per block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.sparse.block_tiles import block_tiles, end_positions, end_tiles, window_tiles
from subquad.ops.sparse.tokens import Tokens
from subquad.ops.tiles.group import MASKED, Tile, TileGroup, pad_to

# In place of a number of tokens: the square root of the length, rounded, and one less.
ROOT, BELOW_ROOT = -2, -3
_MOST = 2**31  # numbers are smaller, so that their products fit into 64 bits


class KeySet(ABC):
    """Keys that a query sees, by their positions. A subclass is a frozen dataclass of numbers, flags and None."""

    @property
    def numbers(self) -> list[int]:
        """Its fields as integers; -1 for None."""
        found = [getattr(self, field.name) for field in fields(self) if field.compare]  # type: ignore[arg-type]
        return [-1 if x is None else int(x) for x in found]

    @classmethod
    def of(cls, numbers: list[int]) -> KeySet:
        """The set with these `numbers`."""
        names = [field for field in fields(cls) if field.compare]  # type: ignore[arg-type]
        return cls(**{field.name: _READ[str(field.type)](n) for field, n in zip(names, numbers, strict=True)})

    @property
    @abstractmethod
    def is_valid(self) -> bool:
        """Whether the numbers describe a set."""

    @property
    def is_shiftable(self) -> bool:
        """Whether its tiles may count from any token, so that sequences may start at different ones."""
        return True

    def at_length(self, length: int) -> KeySet:
        """The set with the square root of this length in the place of `ROOT`."""
        return self

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


_READ: dict[str, Callable[[int], object]] = {"int": int, "bool": bool, "int | None": lambda n: None if n == -1 else n}


def square_root(length: int) -> int:
    """Of a length, rounded; at least 1."""
    return max(1, round(math.sqrt(length)))


def are_counts(*numbers: int | None, least: int = 0) -> bool:
    """Whether all numbers that are not None are at least `least`, and not too large."""
    return all(n is None or least <= n < _MOST for n in numbers)


@dataclass(frozen=True)
class Window(KeySet):
    """Keys up to `before` steps before the query and `after` steps after it (None: all); a step is `dilation` tokens.

    `without_self` leaves the query's own key out.
    """

    before: int | None
    after: int | None
    dilation: int = 1
    without_self: bool = False

    @property
    def is_valid(self) -> bool:
        steps = [n for n in (self.before, self.after) if n != BELOW_ROOT]
        return are_counts(*steps) and (self.dilation == ROOT or are_counts(self.dilation, least=1))

    @property
    def is_shiftable(self) -> bool:
        return self.dilation == 1

    def at_length(self, length: int) -> Window:
        if self.dilation != ROOT and BELOW_ROOT not in (self.before, self.after):
            return self
        root = square_root(length)
        before, after = (root - 1 if n == BELOW_ROOT else n for n in (self.before, self.after))
        return replace(self, before=before, after=after, dilation=root if self.dilation == ROOT else self.dilation)

    def tile_groups(self, x: Tokens) -> list[TileGroup]:
        if self.dilation == 1:
            return [x.tile_group(self._tiles(x, x.length))]
        # Viewed as (steps, dilation), the tokens of one column are consecutive steps.
        dilation = min(self.dilation, x.length)
        steps = -(-x.length // dilation)
        total = steps * dilation
        query, key, value = (pad_to(t, total, -2).unflatten(-2, (steps, dilation)) for t in (x.query, x.key, x.value))
        query = query.movedim(4, 2).flatten(0, 1)  # (B K, dilation, G, steps, D)
        key, value = (t.transpose(2, 3).flatten(0, 1) for t in (key, value))  # (B K, dilation, steps, ...)
        token = torch.arange(total, device=query.device).reshape(steps, dilation).T  # (dilation, steps)
        bias = None if x.bias is None else x.repeat_per_head(x.bias)
        if total > x.length and x.span is None:
            bias = F.pad(key.new_zeros(1, x.length) if bias is None else bias, (0, total - x.length), value=MASKED)
        elif bias is not None:
            bias = pad_to(bias, total, -1)
        bias = None if bias is None else bias.unflatten(1, (steps, dilation)).mT
        span = None
        if x.lengths is not None and x.span is not None:
            counts = (x.lengths[:, None] + dilation - 1 - torch.arange(dilation, device=x.lengths.device)) // dilation
            span = x.repeat_per_head(torch.stack([torch.zeros_like(counts), counts], dim=-1)).expand(len(query), -1, -1)
        tiles = self._tiles(x, steps)
        return [TileGroup(query, key, value, tiles, token.reshape(1, total).clamp(max=x.length), bias, span, span)]

    def _tiles(self, x: Tokens, steps: int) -> tuple[Tile, ...]:
        return cached(window_tiles, x, self.before, self.after, self.without_self, steps)

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

    @property
    def is_valid(self) -> bool:
        return _is_size(self.size) and are_counts(self.before, self.after, self.ends)

    def at_length(self, length: int) -> Blocks:
        return replace(self, size=square_root(length)) if self.size == ROOT else self

    def tile_groups(self, x: Tokens) -> list[TileGroup]:
        numbers = self.size, self.before, self.after, self.is_causal, self.ends
        return [x.tile_group(cached(block_tiles, x, *numbers, x.length))]

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

    @property
    def is_valid(self) -> bool:
        return _is_size(self.size) and are_counts(self.count, least=1) and (self.size == ROOT or self.count <= self.size)

    def at_length(self, length: int) -> BlockEnds:
        if self.size != ROOT:
            return self
        return replace(self, size=square_root(length), count=min(self.count, square_root(length)))

    def tile_groups(self, x: Tokens) -> list[TileGroup]:
        if self.size >= x.length:  # a single block, the query's own
            return []
        key, value, bias = x.keys_at(end_positions(x.length, self.size, self.count, x.key.device)[None])
        tiles = cached(end_tiles, x, self.size, self.count, self.is_causal, x.length)
        return [x.tile_group_with(key, value, tiles, bias)]

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        return (j % self.size >= self.size - self.count) & (i // self.size != j // self.size)

    def seen_later(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        return (j % self.size >= self.size - self.count).expand(torch.broadcast_shapes(j.shape, now.shape))

    def max_seen_later(self, now: int, heads: int) -> int:
        return self.count * -(-now // self.size)


def _is_size(size: int) -> bool:
    return size == ROOT or are_counts(size, least=1)


def cached(build: Callable[..., tuple[Tile, ...]], x: Tokens, *numbers: int | None) -> tuple[Tile, ...]:
    """The tiles that `build` makes of `numbers`, a dtype and a device; made once."""
    return _build_once(build, *numbers, x.query.dtype, x.query.device)


# A mask that was made in inference mode could not be saved for a backward pass later.
@lru_cache(maxsize=768)
@torch.inference_mode(False)
def _build_once(build: Callable[..., tuple[Tile, ...]], *arguments: object) -> tuple[Tile, ...]:
    return build(*arguments)
