"""Random blocks of keys that depend on nothing but a key for each head and the number of the block of queries.

So they can be drawn for any length, in any order and on any device, with the same result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def head_keys(heads: int, seed: int) -> Tensor:
    """One integer for each head: (heads,)."""
    return torch.randint(2**31, (heads,), generator=torch.Generator().manual_seed(seed), device="cpu")


def drawn(
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
    """`count` different blocks for every block of queries, but its window and the global ones: (..., count), -1 for none.

    No more than `most`, which says how many blocks there can be in all.

    Keys, the block of queries, and how many blocks there are in all, broadcast. The window has `side` blocks to each side; the
    `first` and `last` blocks are global.
    """
    below = (torch.minimum(block - side, blocks - last) - first).clamp(min=0)  # to draw from, before the window
    above = (block + side + 1).clamp(min=first)  # the first one to draw from after it
    there = below + (blocks - last - above).clamp(min=0)
    chosen: list[Tensor] = []
    for draw in range(count if most is None else min(count, most)):
        number = _random(keys, block * count + draw) % (there - draw).clamp(min=1)
        for taken in torch.stack(chosen).sort(0).values.unbind(0) if chosen else ():
            number = number + (number >= taken)
        chosen.append(number)
    numbers = torch.stack(chosen, dim=-1)
    found = torch.where(numbers < below[..., None], first + numbers, (above - below)[..., None] + numbers)
    return torch.where(torch.arange(len(chosen), device=keys.device) < there[..., None], found, -1)


def reservoir(keys: Tensor, count: int, total: int) -> Tensor:
    """For each key, samples of `count` among the first n = 0, ..., total numbers: (keys, total + 1, count), -1 for none.

    Number c joins with probability count / (c + 1), in place of a random one (Vitter, 1985).
    """
    number = torch.arange(total, device=keys.device)
    slot = torch.where(number < count, number, _random(keys[:, None], number) % (number + 1))  # (keys, total)
    taken = torch.where(slot[..., None] == torch.arange(count, device=keys.device), number[:, None], -1)
    none = torch.full_like(taken[:, :1], -1) if total else torch.full((len(keys), 1, count), -1, device=keys.device)
    return torch.cat([none, taken], dim=1).cummax(1).values


def _random(key: Tensor, counter: Tensor) -> Tensor:
    """An integer of 32 bits for each key and counter."""
    return _mix(key ^ _mix(counter))


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits that scatters neighbours. Products stay below 2^63."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)
