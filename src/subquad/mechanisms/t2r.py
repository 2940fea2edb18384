"""T2R, transformer to RNN: rectified features of a learned projection.

    o_i = phi(q_i) sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)),    phi(x) = relu(x W + b)

W (D, m) and b (m,) are learned, for each query head and for the keys of each key-value head; both start from the same values.
Kasai et al., 2021. O((N + M) m D) time, an (m, Dv) state. x is q or k itself or, with a `scale` c, sqrt(c) times it. A query
whose weights phi(q) . phi(k) are all 0 gives 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subquad.families.base import Info
from subquad.families.feature_maps import T2R_FEATURES, LearnedKernelized, LearnedMap, T2RMap, needs_module
from subquad.families.kernelized import MEMORY, STATE, TIME, refuses

INFO = Info(
    name="t2r",
    family="kernelized",
    engine="kernelized",
    idea="relu of a small learned projection as features, to turn a pretrained transformer into a recurrent network",
    paper="Kasai et al., 2021, Finetuning Pretrained Transformers into RNNs, arXiv:2103.13076",
    replaces_softmax=True,
    time=TIME,
    memory=MEMORY,
    state=STATE,
    parameters="the projections of queries and keys, with biases",
    refuses=refuses(functional=needs_module("t2r", "T2R", "its maps")),
)


@dataclass(frozen=True, kw_only=True)
class T2R(LearnedKernelized):
    """Attention with rectified features.

    Args:
        features: m; 32 in the paper.
    """

    info: ClassVar[Info] = INFO
    features: int = T2R_FEATURES

    def __post_init__(self) -> None:
        self._require_rows("features")

    @property
    def learned_map(self) -> LearnedMap:
        return T2RMap(self.features)
