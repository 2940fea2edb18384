"""The sets of keys that sparse patterns are made of.

A set knows three things of itself: the tiles that compute it, over whole sequences; whether query i sees key j, which is all
that decoding needs; and which keys later queries can still see, so that a state keeps no others. Tiles are cached by shape.

B batch, H query heads, K key-value heads, G = H / K queries a group, n tokens, W channels, C tokens a block, r random blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.tensors import widen
from subquad.engines.tiles import BARRED, Part, Tile
from subquad.masks import take_tokens


@dataclass(frozen=True, eq=False)
class Tokens:
    """Queries (B, K, G, n, W), keys and values (B, K, n, W) as the kernel takes them: of one width, in float32 at least.

    With `barred`, the last channel of the queries is 1 and that of the keys 0, or `BARRED` for keys that no one may see: so
    pads need no mask, and keys can be padded with rows that add nothing to a softmax.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    barred: bool
    scale: float

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, barred: bool, scale: float) -> Tokens:
        """From query (B, H, n, D), key (B, K, n, D), value (B, K, n, Dv); `allowed` (B, n) are the keys that may be seen."""
        query, key, value = (widen(x) for x in (query, key, value))
        if barred or scale <= 0:  # the kernel would scale what is barred, or bar the future before it scales
            query, scale = query * scale, 1.0
        width = max(query.shape[-1] + barred, value.shape[-1])
        if barred:
            one = query.new_ones(())
            bias = 0 * one if allowed is None else barred_unless(allowed, key.dtype)[:, None, :, None]
            query, key = _with_last(query, one, width), _with_last(key, bias, width)
        query, key, value = (pad_to(x, width, -1) for x in (query, key, value))
        return Tokens(query.unflatten(1, (key.shape[1], -1)), key, value, barred, scale)

    @property
    def length(self) -> int:
        return self.query.shape[3]

    def meets(self, key: Tensor, value: Tensor, tiles: tuple[Tile, ...] | None = None) -> Part:
        """Every query and other keys and values (B, K, m, W), all of them, or as `tiles` say."""
        whole = Tile(0, self.length, 1, 0, 0, key.shape[2])
        query = self.query.flatten(0, 1).unsqueeze(1)
        return Part(query, key.flatten(0, 1).unsqueeze(1), value.flatten(0, 1).unsqueeze(1), tiles or (whole,))

    def padded_keys(self, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, length, W), with barred rows at the end."""
        missing = length - self.length
        if not missing:
            return self.key, self.value
        rows = F.pad(self.key.new_full((missing, 1), BARRED), (self.key.shape[-1] - 1, 0))
        key = torch.cat([self.key, rows.expand(*self.key.shape[:2], -1, -1)], dim=2)
        return key, pad_to(self.value, length, -2)


def _with_last(x: Tensor, last: Tensor, width: int) -> Tensor:
    """x (..., D), zeros, and `last` as the last of `width` channels."""
    return torch.cat([pad_to(x, width - 1, -1), last.expand(*x.shape[:-1], 1)], dim=-1)


def pad_to(x: Tensor, size: int, dim: int) -> Tensor:
    """x, with zeros behind it to make dimension -1 or -2 as large as `size`; F.pad would copy it even for none."""
    missing = size - x.shape[dim]
    return F.pad(x, (0, 0) * (-1 - dim) + (0, missing)) if missing else x


def barred_unless(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(allowed, 0.0, BARRED).to(dtype)


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

    def needs_barred(self, length: int) -> bool:
        """Whether it pads keys."""
        return False


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
            return [x.meets(x.key, x.value, _cached(_window_tiles, x, self, x.length))]
        # Viewed as (steps, dilation), the tokens of one residue are neighbours.
        dilation = min(self.dilation, x.length)
        steps = -(-x.length // dilation)
        total = steps * dilation
        query = pad_to(x.query, total, -2).unflatten(3, (steps, dilation))
        key, value = (t.unflatten(2, (steps, dilation)).transpose(2, 3).flatten(0, 1) for t in x.padded_keys(total))
        place = torch.arange(total, device=query.device).reshape(steps, dilation).T.reshape(1, total)
        query = query.movedim(4, 2).flatten(0, 1)  # (B K, dilation, G, steps, W)
        tiles = _cached(_window_tiles, x, self, steps)
        return [Part(query, key.contiguous(), value.contiguous(), tiles, place.clamp(max=x.length))]

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        seen = (i - j) % self.dilation == 0
        if self.before is not None:
            seen = seen & (i - j <= self.before * self.dilation)
        return seen & (i != j) if self.without_self else seen

    def keeps(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        return j >= (torch.zeros_like(now) if self.before is None else now - self.before * self.dilation)

    def room(self, now: int, heads: int) -> int:
        return now if self.before is None else self.before * self.dilation

    def needs_barred(self, length: int) -> bool:
        return length % min(self.dilation, length) > 0


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
        return [x.meets(x.key, x.value, _cached(_block_tiles, x, self, x.length))]

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
        return [x.meets(key, value, _cached(_end_tiles, x, self, x.length))]

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
        batch, kv_heads, groups, length, width = x.query.shape
        blocks = -(-length // self.size)
        # The last block is one of barred keys, for those that are not there.
        flat = [t.reshape(-1, self.size * width) for t in x.padded_keys((blocks + 1) * self.size)]
        index = torch.where(self.index < 0, blocks, self.index).expand(batch, -1, -1, -1)
        index = index.reshape(batch * kv_heads, -1) + torch.arange(batch * kv_heads, device=index.device)[:, None] * (
            blocks + 1
        )
        key, value = (t.index_select(0, index.flatten()).reshape(batch * kv_heads * groups, 1, -1, width) for t in flat)
        query = x.query.reshape(-1, 1, 1, length, width)
        columns, whole, tail = self.index.shape[-1] * self.size, length // self.size, length % self.size
        tiles = [Tile(0, self.size, whole, 0, columns, columns)] if whole else []
        tiles += [Tile(whole * self.size, tail, 1, whole * columns, 0, columns)] if tail else []
        return [Part(query, key, value, tiles)]

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        return (self.choose(i // self.size, heads) == (j // self.size).unsqueeze(-1)).any(-1)

    def keeps(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        block = now // self.size
        chosen = (self.choose(block, heads) == (j // self.size).unsqueeze(-1)).any(-1)
        return chosen | (j // self.size >= block - self.before)

    def room(self, now: int, heads: int) -> int:
        return self.size * (self.count * heads + self.before + 1)

    def needs_barred(self, length: int) -> bool:
        return True


def seen_by_all(x: Tokens, index: Tensor, there: Tensor, is_causal: bool) -> Part:
    """Keys at positions `index` (B or 1, g), those that are `there`, for all queries; where causal, for those after them."""
    batch, kv_heads = x.key.shape[:2]
    key, value = (take_tokens(t, index.expand(batch, -1)) for t in (x.key, x.value))
    key = F.pad(key[..., :-1], (0, 1))  # barred in the sets, but not here
    visible = there.unsqueeze(1)  # (B or 1, 1, g)
    if is_causal:
        visible = visible & (index.unsqueeze(1) <= torch.arange(x.length, device=index.device)[:, None])
    mask = barred_unless(visible, x.key.dtype).unsqueeze(1)  # (B or 1, 1, n or 1, g)
    if mask.shape[0] > 1:
        mask = mask.repeat_interleave(kv_heads, dim=0)
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
