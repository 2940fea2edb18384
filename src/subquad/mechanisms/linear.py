"""Linear attention: a product of positive features in place of the softmax kernel.

    o_i = phi(q_i) sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)),    phi(x) = elu(x) + 1

Katharopoulos et al., 2020. O((N + M) D Dv) time, a (D, Dv) state. There is no 1/sqrt(D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subquad.engines.call import Call
from subquad.families.base import Info
from subquad.families.kernelized import MEMORY, STATE, TIME, Kernelized, refuses
from subquad.ops.feature_map import FeatureMap, NativeMap, elu_plus_one
from subquad.ops.kernelized import KernelizedRule

INFO = Info(
    name="linear",
    family="kernelized",
    engine="kernelized",
    idea="elu(x) + 1 as the feature map, so that one sum over the keys serves all queries",
    paper="Katharopoulos et al., 2020, Transformers are RNNs, arXiv:2006.16236",
    replaces_softmax=True,
    time=TIME,
    memory=MEMORY,
    state=STATE,
    refuses=refuses(scale="its feature map has no scale; multiply q and k before the call"),
)


@dataclass(frozen=True, kw_only=True)
class Linear(Kernelized):
    """Linear attention; no options."""

    info: ClassVar[Info] = INFO

    def rule(self, call: Call) -> KernelizedRule:
        return KernelizedRule(feature_map=FeatureMap.symmetric(elu_plus_one, call.key.shape[-1], NativeMap("elu")))
