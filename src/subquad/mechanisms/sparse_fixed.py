"""Fixed sparse attention: the query's own block of tokens, and the last few tokens of every block, which summarize it.

    merged   j in the block of i, that is j // l = i // l, or j mod l >= l - c
    split    j in the block of i, in the first half of the heads; j mod l >= l - c or j = i, in the second

and j <= i when causal. Child et al., 2019. O(N (l + c N/l) D) time: O(N sqrt(N) D) at l = sqrt(N), the default. Positions count
real tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from subquad.engines.block_sparse import Layout
from subquad.engines.call import Call
from subquad.families.base import Info
from subquad.families.sparse import HEADS, Heads, SparseMechanism, halves, refuses, without_stride
from subquad.ops.sparse.key_sets import ROOT, BlockEnds, Blocks, square_root

INFO = Info(
    name="sparse_fixed",
    family="sparse",
    engine="block_sparse",
    idea="every query attends to its own block of l tokens and to the last c tokens of every block",
    paper="Child et al., 2019, Generating Long Sequences with Sparse Transformers, arXiv:1904.10509",
    time="O(N (l + c N/l) D), stride l, c summary tokens",
    memory="O(N D)",
    state="O((l + c T/l) D), the current block and the summary tokens; needs a stride",
    state_grows=True,
    refuses=refuses(),
)


@dataclass(frozen=True, kw_only=True)
class SparseFixed(SparseMechanism):
    """Blocks and their summary tokens.

    Args:
        stride: l, the tokens in a block. None: the square root of the length, rounded, for bidirectional attention only.
        summary: c, the number of tokens at the end of each block that summarize it for the queries of other blocks.
        heads: "merged" uses both sets of keys in every head, "split" one set in each half of the heads.
    """

    info: ClassVar[Info] = INFO
    stride: int | None = None
    summary: int = 1
    heads: Heads = "merged"

    def __post_init__(self) -> None:
        self._require_count("summary")
        if self.stride is not None:
            self._require_count("stride")
            if self.summary > self.stride:
                self._refuse("summary", f"must be at most stride, {self.stride}")
        self._require_choice("heads", HEADS)

    @property
    def refuses(self) -> Mapping[str, str]:
        return self.info.refuses if self.stride is not None else without_stride(self.info)

    def for_length(self, length: int) -> SparseFixed:
        return self if self.stride is not None else replace(self, stride=square_root(length))

    def layout(self, call: Call) -> Layout:
        stride, count = self.stride or ROOT, self.summary
        own, ends = Blocks(stride, is_causal=call.is_causal), BlockEnds(stride, count, call.is_causal)
        if self.heads == "merged":
            return Layout(head_groups=((None, (own, ends)),))
        first, second = halves(call.query.shape[1])
        own_ends = Blocks(stride, is_causal=call.is_causal, ends=count)
        groups = ((first, (own,)), (second, (own_ends, ends)))
        return Layout(head_groups=groups if second else groups[:1])
