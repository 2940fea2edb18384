"""Sets of keys, as tiles: what the sparse engines are made of.

A *tile* is a run of equal blocks of queries, each of which meets a run of keys, or a few. A *part* is a list of tiles over its
own arrangement of queries and keys. Every query's set of keys is the disjoint union of what its parts show it.

A pair is barred by adding `BARRED` to its score. A query whose every pair is barred gives 0.

Z sequences, S subsequences of each, G queries a group, n queries, m keys, D channels, E value channels; R = Z G rows of output,
N queries each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BARRED = -1e30  # below every score, yet finite: its exponential is 0, and no infinity meets another
NOTHING = BARRED / 10  # a log-sum-exp below this is one of barred pairs only


@dataclass(frozen=True, eq=False)
class Tile:
    """`count` blocks of `rows` queries, from `start` on; block b meets `columns` keys, from `first + b * step` on.

    `mask` (Z S or 1, count or 1, rows or 1, columns) is added to the scores. `is_causal`: query i meets keys 0 to i of a block.
    `runs` (R or 1, count, r): instead, block b meets r runs of `columns / r` keys, as far as there are any, from there on, and
    none from -1 on.
    """

    start: int
    rows: int
    count: int
    first: int
    step: int
    columns: int
    mask: Tensor | None = None
    is_causal: bool = False
    runs: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Part:
    """What `tiles` show of `key` (Z, S, m, D), `value` (Z, S, m, E) to `query` (Z, S, G, n, D).

    `bias` (Z or 1, S, m), 0 or `BARRED`, is added to all scores of a key. `place` (R or 1, S n) is the row of the output, 0 to
    N - 1, that a query belongs to, and N for a query to forget; rows may repeat. None: as they stand.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    tiles: Sequence[Tile]
    place: Tensor | None = None
    bias: Tensor | None = None

    @property
    def groups(self) -> int:
        return self.query.shape[2]


Plan = Sequence[Sequence[Tile]]  # the tiles of each part, without tensors


def pack(parts: Sequence[Part]) -> tuple[Plan, list[Tensor | None]]:
    """What autograd may know, and the tensors, which it must."""
    plan = [[replace(tile, mask=None, runs=None) for tile in part.tiles] for part in parts]
    tensors = [
        [p.query, p.key, p.value, p.place, p.bias, *itertools.chain.from_iterable((t.mask, t.runs) for t in p.tiles)]
        for p in parts
    ]
    return plan, list(itertools.chain.from_iterable(tensors))


def unpack(plan: Plan, tensors: Sequence[Tensor | None]) -> list[Part]:
    parts, rest = [], iter(tensors)
    for tiles in plan:
        query, key, value, place, bias = itertools.islice(rest, 5)
        assert query is not None
        assert key is not None
        assert value is not None
        parts.append(Part(query, key, value, [replace(tile, mask=next(rest), runs=next(rest)) for tile in tiles], place, bias))
    return parts


def slots(plan: Plan, grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of query, key and value of each part, where `pack` put those."""
    rest = iter(grads)
    found = [[next(rest), next(rest), next(rest), *[None] * (2 + 2 * len(tiles))] for tiles in plan]
    return list(itertools.chain.from_iterable(found))


def barred_unless(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(allowed, 0.0, BARRED).to(dtype)
