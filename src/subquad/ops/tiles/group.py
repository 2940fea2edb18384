"""The vocabulary of softmax over tiles.

A *tile* is a run of equal blocks of queries, each of which sees one run of keys, or a few. A *tile group* is a list of tiles
over one arrangement of queries and keys. Softmax attention over a list of tile groups is over the disjoint union of the keys
that they show a query.

A pair is masked by a score of minus infinity. A query whose pairs are all masked is an *empty row* of the output: it is 0.

Z sequences, one per batch entry and key-value head, S subsequences of each, G query heads per key-value head, n queries, m
keys, D channels, E value channels; R = Z G rows of output, N queries each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MASKED = -math.inf  # below every score, however large scores are


class Tile(NamedTuple):
    """`blocks` equal blocks of `rows` queries, from `first_row` on. Block b sees the `columns` keys that start at
    `first_column + b * column_step`.

    `mask` (Z S or 1, blocks or 1, rows or 1, columns) is 0, or `MASKED` for pairs to leave out. `is_causal`: query i of a
    block sees its keys 0 to i. `run_starts` (R or 1, blocks, r): block b sees r runs of `columns / r` keys instead, which start
    there. A run ends early where there are no more keys, and is left out if it starts at -1.
    """

    first_row: int
    rows: int
    blocks: int
    first_column: int
    column_step: int
    columns: int
    mask: Tensor | None = None
    is_causal: bool = False
    run_starts: Tensor | None = None


class TileGroup(NamedTuple):
    """What `tiles` show of `key` (Z, S, m, D), `value` (Z, S, m, E) to `query` (Z, S, G, n, D).

    `bias` (Z or 1, S, m) is 0, or `MASKED` for keys that no query sees. `output_row` (R or 1, S n) is the row of the output,
    0 to N - 1, that a query belongs to; several queries may share one. N discards a query. None: row i for query i.

    `query_span` and `key_span` (Z, S, 2), for the compiled kernel only: the first query or key of each subsequence that is
    there, and how many are. Tiles, masks and biases count from the first. The others are never read; their rows of the output
    and of gradients are 0. None: all are there.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    tiles: Sequence[Tile]
    output_row: Tensor | None = None
    bias: Tensor | None = None
    query_span: Tensor | None = None
    key_span: Tensor | None = None

    @property
    def query_heads(self) -> int:
        """G."""
        return self.query.shape[2]

    @property
    def constants(self) -> list[Tensor | None]:
        """The tensors that no gradient flows to."""
        return [*self[4:], *(t for tile in self.tiles for t in (tile.mask, tile.run_starts))]


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `allowed`, `MASKED` elsewhere."""
    return torch.where(allowed, 0.0, MASKED).to(dtype)


def differentiable(groups: Sequence[TileGroup]) -> list[Tensor]:
    """The query, key and value of each group."""
    return [x for group in groups for x in (group.query, group.key, group.value)]


def pad_to(x: Tensor, size: int, dim: int) -> Tensor:
    """x with zeros appended to make dimension -1 or -2 as large as `size`; unlike F.pad, no copy where none are needed."""
    missing = size - x.shape[dim]
    return torch.nn.functional.pad(x, (0, 0) * (-1 - dim) + (0, missing)) if missing else x
