"""The sets of keys that sparse patterns are made of.

A set knows three things of itself: the tiles that compute it, over whole sequences; whether query i sees key j, which is all
that decoding needs; and which keys later queries can still see, so that a state keeps no others. Tiles are cached by shape.

B batch, H query heads, K key-value heads, G = H / K queries a group, n tokens, D channels, E value channels, C tokens a block,
r random blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.block_sparse.plan import BARRED, Part, Tile, barred_unless
from subquad.engines.block_sparse.softmax import pad_to
from subquad.masks import take_tokens
from subquad.ops.precision import upcast


@dataclass(frozen=True, eq=False)
class Tokens:
    """Queries (B, K, G, n, D), keys (B, K, n, D) and values (B, K, n, E), in float32 at least.

    `bias` (B or 1, n) is 0, or `BARRED` for keys that no one may see; None: all may be seen.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tokens:
        """From query (B, H, n, D), key (B, K, n, D), value (B, K, n, E); `allowed` (B, n) are the keys that may be seen."""
        query, key, value = (upcast(x) for x in (query, key, value))
        bias = None if allowed is None else barred_unless(allowed, key.dtype)
        return Tokens(query.unflatten(1, (key.shape[1], -1)), key, value, bias)

    @property
    def length(self) -> int:
        return self.query.shape[3]

    def meets(self, key: Tensor, value: Tensor, tiles: tuple[Tile, ...] | None = None, bias: Tensor | None = None) -> Part:
        """Every query and keys and values (B, K, m, ...), all of them, or as `tiles` say; `bias` is (B or 1, m)."""
        whole = Tile(0, self.length, 1, 0, 0, key.shape[2])
        query, key, value = (x.flatten(0, 1).unsqueeze(1) for x in (self.query, key, value))
        return Part(query, key, value, tiles or (whole,), bias=None if bias is None else self.each_head(bias).unsqueeze(1))

    def meets_itself(self, tiles: tuple[Tile, ...]) -> Part:
        return self.meets(self.key, self.value, tiles, self.bias)

    def each_head(self, bias: Tensor) -> Tensor:
        """What is there for each of B sequences, for each of B K."""
        return bias if bias.shape[0] == 1 else bias.repeat_interleave(self.key.shape[1], dim=0)


class KeySet(ABC):
    """Keys that a query sees, by their positions."""

    @abstractmethod
    def parts(self, x: Tokens) -> list[Part]:
        """The tiles that compute it."""

    @abstractmethod
    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        """Whether queries at i see keys at j <= i; i, j and the query heads broadcast."""

    @abstractmethod
    def keeps(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        """Whether a query at `now` or later may see the key at j; j, now and the query heads broadcast."""

    @abstractmethod
    def room(self, now: int, heads: int) -> int:
        """How many keys it keeps at most, for `heads` query heads together."""


@dataclass(frozen=True)
class Window(KeySet):
    """Keys up to `before` steps before the query and `after` steps after it (None: all); a step is `dilation` tokens.

    `without_self` leaves the query's own key out.
    """

    before: int | None
    after: int | None
    dilation: int = 1
    without_self: bool = False

    def parts(self, x: Tokens) -> list[Part]:
        if self.dilation == 1:
            return [x.meets_itself(_cached(_window_tiles, x, self, x.length))]
        # Viewed as (steps, dilation), the tokens of one residue are neighbours.
        dilation = min(self.dilation, x.length)
        steps = -(-x.length // dilation)
        total = steps * dilation
        query, key, value = (pad_to(t, total, -2).unflatten(-2, (steps, dilation)) for t in (x.query, x.key, x.value))
        query = query.movedim(4, 2).flatten(0, 1)  # (B K, dilation, G, steps, D)
        key, value = (t.transpose(2, 3).flatten(0, 1) for t in (key, value))  # (B K, dilation, steps, ...)
        place = torch.arange(total, device=query.device).reshape(steps, dilation).T  # (dilation, steps)
        bias = None if x.bias is None else x.each_head(x.bias)
        if total > x.length:
            bias = F.pad(key.new_zeros(1, x.length) if bias is None else bias, (0, total - x.length), value=BARRED)
        bias = None if bias is None else bias.unflatten(1, (steps, dilation)).mT
        tiles = _cached(_window_tiles, x, self, steps)
        return [Part(query, key, value, tiles, place.reshape(1, total).clamp(max=x.length), bias)]

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        seen = (i - j) % self.dilation == 0
        if self.before is not None:
            seen = seen & (i - j <= self.before * self.dilation)
        return seen & (i != j) if self.without_self else seen

    def keeps(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        return j >= (torch.zeros_like(now) if self.before is None else now - self.before * self.dilation)

    def room(self, now: int, heads: int) -> int:
        return now if self.before is None else self.before * self.dilation


@dataclass(frozen=True)
class Blocks(KeySet):
    """All keys of the query's own block of C tokens, of `before` blocks before it and of `after` blocks after it.

    `is_causal` leaves out later keys; `ends` leaves out all but the last `ends` keys of a block, and the query's own key.
    """

    size: int
    before: int = 0
    after: int = 0
    is_causal: bool = False
    ends: int | None = None

    def parts(self, x: Tokens) -> list[Part]:
        return [x.meets_itself(_cached(_block_tiles, x, self, x.length))]

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        apart = i // self.size - j // self.size
        seen = apart <= self.before
        return seen if self.ends is None else seen & ((j % self.size >= self.size - self.ends) | (i == j))

    def keeps(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        return j // self.size >= now // self.size - self.before

    def room(self, now: int, heads: int) -> int:
        return self.size * (self.before + 1)


@dataclass(frozen=True)
class Ends(KeySet):
    """The last `count` keys of every block of C tokens but the query's own; `is_causal` leaves out later blocks."""

    size: int
    count: int
    is_causal: bool

    def parts(self, x: Tokens) -> list[Part]:
        index = _ends(x.length, self.size, self.count, x.key.device)
        if not index.numel():
            return []
        key, value = (t.index_select(2, index) for t in (x.key, x.value))
        bias = None if x.bias is None else x.bias.index_select(1, index)
        return [x.meets(key, value, _cached(_end_tiles, x, self, x.length), bias)]

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        return (j % self.size >= self.size - self.count) & (i // self.size != j // self.size)

    def keeps(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        return (j % self.size >= self.size - self.count).expand(torch.broadcast_shapes(j.shape, now.shape))

    def room(self, now: int, heads: int) -> int:
        return self.count * -(-now // self.size)


@dataclass(frozen=True, eq=False)
class Scattered(KeySet):
    """Any blocks of C keys, r for each head and each block of queries.

    `choose` maps blocks of queries and heads, which broadcast, to the numbers (..., r) of their blocks of keys, -1 for none.
    `index` (B or 1, H, blocks, r) are those of a whole sequence. As queries go on, chosen blocks are let go, and new ones taken
    among those that lie more than `before` blocks back; never one that was let go.
    """

    size: int
    count: int
    before: int
    index: Tensor
    choose: Callable[[Tensor, Tensor], Tensor]

    def parts(self, x: Tokens) -> list[Part]:
        columns, whole, tail = self.index.shape[-1] * self.size, x.length // self.size, x.length % self.size
        runs = torch.where(self.index < 0, -1, self.index * self.size).expand(len(x.key), -1, -1, -1).flatten(0, 1)
        tiles = [Tile(0, self.size, whole, 0, 0, columns, runs=runs[:, :whole])] if whole else []
        tiles += [Tile(whole * self.size, tail, 1, 0, 0, columns, runs=runs[:, whole:])] if tail else []
        return [x.meets_itself(tuple(tiles))]

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        return (self.choose(i // self.size, heads) == (j // self.size).unsqueeze(-1)).any(-1)

    def keeps(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        block = now // self.size
        chosen = (self.choose(block, heads) == (j // self.size).unsqueeze(-1)).any(-1)
        return chosen | (j // self.size >= block - self.before)

    def room(self, now: int, heads: int) -> int:
        return self.size * (self.count * heads + self.before + 1)


def seen_by_all(x: Tokens, index: Tensor, there: Tensor, is_causal: bool) -> Part:
    """Keys at positions `index` (B or 1, g), those that are `there`, for all queries; where causal, for those after them."""
    key, value = (take_tokens(t, index.expand(len(t), -1)) for t in (x.key, x.value))
    visible = there.unsqueeze(1)  # (B or 1, 1, g)
    if is_causal:
        visible = visible & (index.unsqueeze(1) <= torch.arange(x.length, device=index.device)[:, None])
    mask = x.each_head(barred_unless(visible, x.key.dtype)).unsqueeze(1)  # (B K or 1, 1, n or 1, g)
    return x.meets(key, value, (Tile(0, x.length, 1, 0, 0, index.shape[1], mask),))


def _cached(build: Callable[..., tuple[Tile, ...]], x: Tokens, pattern: KeySet, length: int) -> tuple[Tile, ...]:
    """The tiles of a length, built once; those of a traced call, or of fake tensors, are not kept."""
    keep = type(x.query) is Tensor and not torch.compiler.is_compiling()
    build = build if keep else build.__wrapped__  # type: ignore[attr-defined]
    return build(pattern, length, x.query.dtype, x.query.device)


@lru_cache(maxsize=256)
def _window_tiles(window: Window, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tile, ...]:
    """Blocks of queries, each with the keys from `before` its first query to `after` its last one."""
    before = length - 1 if window.before is None else min(window.before, length - 1)
    after = length - 1 if window.after is None else min(window.after, length - 1)
    if not window.without_self and before == length - 1 and after in (0, length - 1):
        return (Tile(0, length, 1, 0, 0, length, is_causal=after == 0 and length > 1),)
    rows = min(_rows_for(before + after), length)
    apart = torch.arange(rows + before + after, device=device) - torch.arange(rows, device=device)[:, None]  # j - i + before
    allowed = (apart >= 0) & (apart <= before + after)
    if window.without_self:
        allowed &= apart != before
    return _run(rows, before, after, length, barred_unless(allowed, dtype))


def _rows_for(width: int) -> int:
    """The kernel takes 64 rows at a time from 192 on, 32 below; longer blocks read more keys that they do not need."""
    return 192 if width >= 384 else 64


@lru_cache(maxsize=256)
def _block_tiles(blocks: Blocks, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tile, ...]:
    size = min(blocks.size, length)
    before, after = (0, 0) if size == length else (blocks.before * size, blocks.after * size)
    mask = None
    if blocks.is_causal or blocks.ends is not None:
        i = torch.arange(size, device=device)[:, None] + before
        j = torch.arange(before + size + after, device=device)
        allowed = torch.ones(size, len(j), dtype=torch.bool, device=device)
        if blocks.is_causal:
            allowed &= i >= j
        if blocks.ends is not None:
            allowed &= (j % size >= blocks.size - blocks.ends) | (i == j)
        mask = barred_unless(allowed, dtype)
    return _run(size, before, after, length, mask)


def _run(rows: int, before: int, after: int, length: int, mask: Tensor | None) -> tuple[Tile, ...]:
    """Blocks of `rows` queries, each with the keys from `before` its first to `after` its last, as far as there are any.

    `mask` (rows, before + rows + after) is that of a block in the middle. Those are all alike: one tile.
    """
    starts = range(0, length, rows)
    middle = [s for s in starts if s >= before and s + rows + after <= length]
    found = []
    for start in starts:
        if middle and middle[0] < start <= middle[-1]:
            continue
        inside = bool(middle) and start == middle[0]
        count, height = (len(middle), rows) if inside else (1, min(rows, length - start))
        first, last = max(start - before, 0), min(start + rows + after, length)
        cut = None
        if mask is not None:
            cut = mask[:height, first - start + before : last - start + before][None, None]
        found.append(Tile(start, height, count, first, rows, last - first, cut))
    return tuple(found)


@lru_cache(maxsize=256)
def _end_tiles(ends: Ends, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tile, ...]:
    size, whole, tail = ends.size, length // ends.size, length % ends.size
    block = _ends(length, size, ends.count, device) // size
    query = torch.arange(whole + (tail > 0), device=device)[:, None]
    mask = barred_unless(block < query if ends.is_causal else block != query, dtype)[None, :, None]  # (1, blocks, 1, ends)
    found = [Tile(0, size, whole, 0, 0, len(block), mask[:, :whole])] if whole else []
    found += [Tile(whole * size, tail, 1, 0, 0, len(block), mask[:, whole:])] if tail else []
    return tuple(found)


def _ends(length: int, size: int, count: int, device: torch.device) -> Tensor:
    """The positions of the last `count` tokens of every block, as far as there are any."""
    blocks = torch.arange(-(-length // size), device=device)[:, None] * size
    there = length // size * count + max(0, length % size - (size - count))
    return (blocks + torch.arange(size - count, size, device=device)).flatten()[:there]
