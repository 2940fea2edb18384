"""Random blocks of keys. They depend only on an integer per head, its hash key, and the number of the block of queries.

So they can be drawn for any length, in any order and on any device, with the same result.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_AT_ONCE = 2**14  # numbers of a sample to go through at a time
_KEPT = 16  # samples that are remembered


def head_keys(heads: int, seed: int) -> Tensor:
    """The hash key of each head: (heads,)."""
    return torch.randint(2**31, (heads,), generator=torch.Generator().manual_seed(seed), device="cpu")


def draw_blocks(
    keys: Tensor,
    block: Tensor,
    blocks: Tensor,
    count: int,
    *,
    first: int,
    last: int,
    side: int,
    most: int | None = None,
) -> Tensor:
    """`count` distinct blocks for every block of queries, outside its window and not global: (..., count), -1 for none.

    Args:
        keys, block, blocks: the heads' hash keys, the block of queries and the total number of blocks; they broadcast.
        count: the number of blocks to draw.
        first, last: how many blocks are global at the start and at the end.
        side: the number of blocks in the window on each side.
        most: an upper bound of `blocks`, and so of the number of blocks drawn.
    """
    below = (torch.minimum(block - side, blocks - last) - first).clamp(min=0)  # the number of candidates before the window
    above = (block + side + 1).clamp(min=first)  # the first candidate after the window
    candidates = below + (blocks - last - above).clamp(min=0)
    drawn: list[Tensor] = []
    for draw in range(count if most is None else min(count, most)):
        number = _random(keys, block * count + draw) % (candidates - draw).clamp(min=1)
        for taken in torch.stack(drawn).sort(0).values.unbind(0) if drawn else ():
            number = number + (number >= taken)
        drawn.append(number)
    numbers = torch.stack(drawn, dim=-1)
    found = torch.where(numbers < below[..., None], first + numbers, (above - below)[..., None] + numbers)
    return torch.where(torch.arange(len(drawn), device=keys.device) < candidates[..., None], found, -1)


def reservoir_samples(keys: Tensor, count: int, total: int) -> Tensor:
    """For each key, samples of `count` of the first n = 0, ..., total numbers: (keys, total + 1, count), -1 for none.

    Number c replaces a random one with probability count / (c + 1) (Vitter, 1985).
    """
    none = torch.full((len(keys), 1, count), -1, device=keys.device)
    return torch.cat([none, _taken(keys, count, 0, total)], dim=1).cummax(1).values


class RunningSamples:
    """Those of `reservoir_samples` at a few n, each made from the last one before it, if that is known."""

    def __init__(self, keys: Tensor, count: int) -> None:
        self._keys, self._count = keys, count
        self._known = {0: keys.new_full((len(keys), count), -1)}

    def at(self, totals: Tensor) -> Tensor:
        """The samples of the first n numbers, for n in `totals`, in ascending order: (keys, totals, count)."""
        if not totals.numel():
            return totals.new_empty(len(self._keys), 0, self._count)
        return torch.stack([self._sample(total) for total in totals.tolist()], dim=1).to(totals.device)

    def _sample(self, total: int) -> Tensor:
        known = self._known  # replaced as a whole, since threads share it
        start = max(n for n in known if n <= total)
        sample = known[start]
        for first in range(start, total, _AT_ONCE):
            sample = sample.maximum(_taken(self._keys, self._count, first, min(first + _AT_ONCE, total)).amax(1))
        if start != total:
            latest = sorted({*known, total} - {0})[-_KEPT:]
            self._known = {n: sample if n == total else known[n] for n in (0, *latest)}
        return sample


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def running_samples(keys: tuple[int, ...], count: int) -> RunningSamples:
    """The samples of these hash keys, the same object in every call."""
    return RunningSamples(torch.tensor(keys), count)


def _taken(keys: Tensor, count: int, first: int, last: int) -> Tensor:
    """(keys, last - first, count): each number where it takes the place of another in a sample, -1 elsewhere."""
    number = torch.arange(first, last, device=keys.device)
    slot = torch.where(number < count, number, _random(keys[:, None], number) % (number + 1))
    return torch.where(slot[..., None] == torch.arange(count, device=keys.device), number[:, None], -1)


def _random(key: Tensor, counter: Tensor) -> Tensor:
    """A 32-bit integer for each key and counter."""
    return _mix(key ^ _mix(counter))


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers that maps neighbours far apart. Products stay below 2^63."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)
