"""Strided sparse attention: the neighbours, and every l-th token beyond them.

    merged   j with |i - j| < l  or  (i - j) mod l = 0
    split    |i - j| < l in the first half of the heads, (i - j) mod l = 0 in the others

and j <= i when causal. Child et al., 2019. O(N (l + N/l) D) time: O(N sqrt(N) D) at l = sqrt(N), the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from subquad.engines.block_sparse import Layout
from subquad.engines.block_sparse.key_sets import Window
from subquad.engines.call import Call
from subquad.families.base import Info
from subquad.families.sparse import HEADS, Heads, Pattern, default_stride, halves, no_stride, refuses

INFO = Info(
    name="sparse_strided",
    family="sparse",
    engine="block_sparse",
    idea="every query sees its neighbours and every l-th token beyond them",
    paper="Child et al., 2019, Generating Long Sequences with Sparse Transformers, arXiv:1904.10509",
    time="O(N (l + N/l) D), stride l",
    memory="O(N D)",
    state="O(T D), the keys and values: each is seen again every l tokens; needs a stride",
    state_grows=True,
    refuses=refuses(),
)


@dataclass(frozen=True, kw_only=True)
class SparseStrided(Pattern):
    """Neighbours and a stride.

    Args:
        stride: l; None takes the root of the length, rounded, which is defined bidirectionally only.
        heads: "merged", both sets in every head; "split", one each in half of the heads.
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
        return self.info.refuses if self.stride is not None else no_stride(self.info)

    def for_length(self, length: int) -> SparseStrided:
        return self if self.stride is not None else replace(self, stride=default_stride(length))

    def layout(self, call: Call) -> Layout:
        stride = self.stride or default_stride(call.key.shape[2])
        after = 0 if call.is_causal else None
        strided = Window(None, after, dilation=stride)
        near = Window(stride - 1, 0 if call.is_causal else stride - 1, without_self=self.heads == "merged")
        if self.heads == "merged":
            return Layout(groups=((None, (near, strided)),), is_causal=call.is_causal)
        first, second = halves(call.query.shape[1])
        groups = ((first, (near,)), (second, (strided,)))
        return Layout(groups=groups if second else groups[:1], is_causal=call.is_causal)
