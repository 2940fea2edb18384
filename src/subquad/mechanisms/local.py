"""Local attention: every query attends to the keys around it.

    o_i = sum_j softmax_j(s q_i . k_j) v_j    over |i - j| <= window * dilation,  (i - j) mod dilation = 0

and j <= i when causal. O(N window D) time. Runs on overlapping views of the keys, without copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subquad.engines.block_sparse import Layout
from subquad.engines.call import Call
from subquad.families.base import Info
from subquad.families.sparse import SparseMechanism, refuses
from subquad.ops.sparse.key_sets import Window

INFO = Info(
    name="local",
    family="sparse",
    engine="block_sparse",
    idea="every query attends to the keys within a window around it",
    paper="Child et al., 2019, Generating Long Sequences with Sparse Transformers, arXiv:1904.10509; Beltagy et al., 2020",
    time="O(N w D), w keys on each side",
    memory="O(N D)",
    state="O(w D), the window",
    refuses=refuses(),
)


@dataclass(frozen=True, kw_only=True)
class Local(SparseMechanism):
    """A sliding window.

    Args:
        window: how many steps a query looks to each side; when causal, to the left only.
        dilation: the number of tokens in a step.
    """

    info: ClassVar[Info] = INFO
    window: int = 256
    dilation: int = 1

    def __post_init__(self) -> None:
        self._require_whole("window")
        self._require_count("dilation")

    def layout(self, call: Call) -> Layout:
        window = Window(self.window, 0 if call.is_causal else self.window, self.dilation)
        return Layout(head_groups=((None, (window,)),))
