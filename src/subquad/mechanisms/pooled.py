"""Pooled attention: exact attention to the nearest tokens, and to all tokens through means of segments.

    o_i = sum_j softmax_j(s q_i . k_j) v_j    over j in {t: |i - t| <= window}  and  {means of tokens p m to p m + p - 1}

in one softmax; when causal, over t <= i and the segments that end before i. Keys and values are averaged alike. A token in the
window counts on its own and in its segment; a segment counts as one key. O(N (window + N/p) D) time, which is still quadratic,
but divided by p. Positions count real tokens only. Defined by this project; compare Liu et al., 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subquad.engines.block_sparse import Layout
from subquad.engines.call import Call
from subquad.families.base import Info
from subquad.families.sparse import SparseMechanism, refuses
from subquad.ops.sparse.key_sets import Window
from subquad.ops.sparse.segment_means import SegmentMeans

INFO = Info(
    name="pooled",
    family="low_rank",
    engine="block_sparse",
    idea="the keys within a window and the means of all segments of keys, in one softmax",
    paper="this project; compare Liu et al., 2018, Generating Wikipedia by Summarizing Long Sequences, arXiv:1801.10198",
    time="O(N (w + N/p) D), w keys on each side, segments of p tokens",
    memory="O(N D)",
    state="O((w + p + T/p) D), the window, the complete segments and the tokens of the last one",
    state_grows=True,
    refuses=refuses(),
)


@dataclass(frozen=True, kw_only=True)
class Pooled(SparseMechanism):
    """A window and means of segments.

    Args:
        stride: p, the number of tokens in a segment.
        window: how many tokens to each side a query attends to directly; when causal, to the left only.
    """

    info: ClassVar[Info] = INFO
    stride: int = 16
    window: int = 64

    def __post_init__(self) -> None:
        self._require_count("stride")
        self._require_whole("window")

    def layout(self, call: Call) -> Layout:
        window = Window(self.window, 0 if call.is_causal else self.window)
        segments = SegmentMeans(self.stride, call.is_causal)
        return Layout(head_groups=((None, (window, segments)),))
