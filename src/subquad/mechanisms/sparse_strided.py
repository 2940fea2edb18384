"""Strided sparse attention: the nearest tokens, and every l-th token beyond them.

    merged   j with |i - j| < l  or  (i - j) mod l = 0
    split    |i - j| < l in the first half of the heads, (i - j) mod l = 0 in the second

and j <= i when causal. Child et al., 2019. O(N (l + N/l) D) time: O(N sqrt(N) D) at l = sqrt(N), the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from subquad.engines.block_sparse import Layout
from subquad.engines.call import Call
from subquad.families.base import Info
from subquad.families.sparse import HEADS, Heads, SparseMechanism, halves, refuses, without_stride
from subquad.ops.sparse.key_sets import BELOW_ROOT, ROOT, Window, square_root

INFO = Info(
    name="sparse_strided",
    family="sparse",
    engine="block_sparse",
    idea="every query attends to the nearest tokens and to every l-th token beyond them",
    paper="Child et al., 2019, Generating Long Sequences with Sparse Transformers, arXiv:1904.10509",
    time="O(N (l + N/l) D), stride l",
    memory="O(N D)",
    state="O(T D), all keys and values: each is used again every l tokens; needs a stride",
    state_grows=True,
    refuses=refuses(),
)


@dataclass(frozen=True, kw_only=True)
class SparseStrided(SparseMechanism):
    """The nearest tokens and a stride.

    Args:
        stride: l. None: the square root of the length, rounded, for bidirectional attention only.
        heads: "merged" uses both sets of keys in every head, "split" one set in each half of the heads.
    """

    info: ClassVar[Info] = INFO
    stride: int | None = None
    heads: Heads = "merged"

    def __post_init__(self) -> None:
        if self.stride is not None:
            self._require_count("stride")
        self._require_choice("heads", HEADS)

    @property
    def refuses(self) -> Mapping[str, str]:
        return self.info.refuses if self.stride is not None else without_stride(self.info)

    def for_length(self, length: int) -> SparseStrided:
        return self if self.stride is not None else replace(self, stride=square_root(length))

    def layout(self, call: Call) -> Layout:
        side = BELOW_ROOT if self.stride is None else self.stride - 1
        strided = Window(None, 0 if call.is_causal else None, dilation=self.stride or ROOT)
        near = Window(side, 0 if call.is_causal else side, without_self=self.heads == "merged")
        if self.heads == "merged":
            return Layout(head_groups=((None, (near, strided)),))
        first, second = halves(call.query.shape[1])
        groups = ((first, (near,)), (second, (strided,)))
        return Layout(head_groups=groups if second else groups[:1])
