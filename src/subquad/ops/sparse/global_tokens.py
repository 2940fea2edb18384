"""Global tokens: every query sees them, and they see every key. Which tokens are global is a rule, or a mask.

B batch, n tokens, g global tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.masks import real_first
from subquad.ops.sparse.key_sets import are_counts


class GlobalTokens(NamedTuple):
    """The global tokens of a batch, by their position among the real tokens."""

    position: Tensor  # (B or 1, g)
    exists: Tensor  # (B or 1, g) bool: False for entries that stand for no token
    are_first: bool  # token i is at position i

    def among(self, length: int) -> Tensor:
        """(B or 1, n) bool: which of all tokens they are."""
        position, exists = self.position, self.exists
        if position.shape[0] == 1:  # a token that does not exist in one sequence is a pad there
            exists = exists.any(0, keepdim=True)
        found = torch.zeros(position.shape[0], length + 1, dtype=torch.bool, device=position.device)
        return found.scatter(1, torch.where(exists, position, length), True)[:, :length]


@dataclass(frozen=True)
class FirstTokens:
    """The first `count` tokens."""

    count: int

    @property
    def is_valid(self) -> bool:
        return are_counts(self.count)

    @property
    def numbers(self) -> list[int]:
        return [self.count]

    def tokens(self, lengths: Tensor, length: int) -> GlobalTokens | None:
        """Those of sequences of `lengths` (B or 1,) real tokens, at most `length`."""
        if not self.count:
            return None
        index = torch.arange(min(self.count, length), device=lengths.device)[None]
        return GlobalTokens(index, index < lengths[:, None], True)


@dataclass(frozen=True)
class EndBlocks:
    """The tokens of the first and the last few blocks of `size` tokens."""

    size: int
    first: int
    last: int

    @property
    def is_valid(self) -> bool:
        return are_counts(self.size, least=1) and are_counts(self.first, self.last)

    @property
    def numbers(self) -> list[int]:
        return [self.size, self.first, self.last]

    def tokens(self, lengths: Tensor, length: int) -> GlobalTokens | None:
        """Those of sequences of `lengths` (B or 1,) real tokens, at most `length`."""
        if not self.first + self.last:
            return None
        size, lengths = min(self.size, length), lengths[:, None]
        blocks = (lengths + size - 1) // size  # (B or 1, 1)
        first, last = (min(n, -(-length // size)) for n in (self.first, self.last))
        within = torch.arange(size, device=lengths.device)
        front = torch.arange(first, device=lengths.device).expand(lengths.shape[0], -1)
        back = blocks - 1 - torch.arange(last, device=lengths.device)
        back = torch.where(back >= first, back, blocks)  # blocks that are global already become one that does not exist
        index = (torch.cat([front, back], dim=1)[:, :, None] * size + within).flatten(1)
        exists = index < lengths
        return GlobalTokens(torch.where(exists, index, 0), exists, not last)


def tokens_of_mask(global_mask: Tensor, span: Tensor | None) -> GlobalTokens | None:
    """The tokens where `global_mask` (B, n) is True; `span` (B, 2) has the first real token of each sequence."""
    most = int(global_mask.sum(1).max()) if global_mask.numel() else 0
    position, exists = (t[:, :most] for t in real_first(global_mask))
    if span is not None:
        position = torch.where(exists, position - span[:, :1], 0)
    return GlobalTokens(position, exists, False) if most else None
