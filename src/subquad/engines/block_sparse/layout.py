"""The layout of a block-sparse mechanism: which keys each query sees, as a mechanism states it.

B batch, H query heads, K key-value heads, n tokens, D channels, Dv value channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from subquad.engines.block_sparse.segments import Segments
from subquad.ops.sparse.global_tokens import EndBlocks, FirstTokens
from subquad.ops.sparse.key_sets import KeySet
from subquad.ops.sparse.pattern import Heads, Pattern
from subquad.ops.sparse.segment_means import SegmentMeans


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Which keys each query sees: the disjoint union of a few sets. Positions count real tokens only; pads output 0.

    Args:
        head_groups: for each group of query heads the sets of keys that its queries see.
        global_rule: which tokens are global in a whole sequence; a `global_mask` in the call replaces them.
        first_global: how many of the first real tokens are global; the only global tokens that decoding supports.
        extra: keys (K, m, D) and values (K, m, Dv) that every query sees as well.
        global_rows: queries (B, H, n, D), keys (B, K, n, D) and values (B, K, n, Dv) for the rows of global tokens; None: those
            of the call.
        draw: (H,), the hash keys of random blocks.
    """

    head_groups: tuple[tuple[Heads, tuple[KeySet, ...]], ...]
    global_rule: FirstTokens | EndBlocks | None = None
    first_global: int = 0
    extra: tuple[Tensor, Tensor] | None = None
    global_rows: tuple[Tensor, Tensor, Tensor] | None = None
    draw: Tensor | None = None

    @property
    def pattern(self) -> Pattern:
        """What of it is numbers."""
        return Pattern(self.head_groups, self.global_rule)

    @property
    def key_sets(self) -> list[KeySet]:
        """The sets of all heads."""
        return [key_set for _, key_sets in self.head_groups for key_set in key_sets]

    @property
    def segments(self) -> Segments | None:
        """What a decode state has to keep of segments, if there are any."""
        return next((Segments(key_set.size) for key_set in self.key_sets if isinstance(key_set, SegmentMeans)), None)
