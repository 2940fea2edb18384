"""The layout of a block-sparse mechanism: which keys each query sees, as a mechanism states it.

B batch, H query heads, K key-value heads, n tokens, D channels, Dv value channels, g global tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from subquad.engines.block_sparse.key_sets import KeySet
from subquad.engines.block_sparse.segments import Segments

Heads = tuple[int, ...] | None  # query heads; None: all


class GlobalTokens(NamedTuple):
    """Tokens that every query sees, and that see every key."""

    position: Tensor  # (B or 1, g)
    exists: Tensor  # (B or 1, g) bool: False for entries that stand for no token


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Which keys each query sees: the disjoint union of a few sets. Positions count real tokens only; pads output 0.

    Args:
        head_groups: for each group of query heads the sets of keys that its queries see.
        global_tokens: those of a whole sequence; a `global_mask` in the call replaces them.
        first_global: how many of the first real tokens are global; the only global tokens that decoding supports.
        extra: keys (K, m, D) and values (K, m, Dv) that every query sees as well.
        global_rows: queries (B, H, n, D), keys (B, K, n, D) and values (B, K, n, Dv) for the rows of global tokens; None: those
            of the call.
    """

    head_groups: tuple[tuple[Heads, tuple[KeySet, ...]], ...]
    global_tokens: GlobalTokens | None = None
    first_global: int = 0
    extra: tuple[Tensor, Tensor] | None = None
    global_rows: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def key_sets(self) -> list[KeySet]:
        """The sets of all heads."""
        return [key_set for _, key_sets in self.head_groups for key_set in key_sets]

    @property
    def segments(self) -> Segments | None:
        """The set of segment means, which a decode state has to keep, if there is one."""
        return next((key_set for key_set in self.key_sets if isinstance(key_set, Segments)), None)
