"""First-order attention: the first-order Taylor expansion of e^(q.k) on unit vectors.

    o_i = sum_j (1 + q^_i . k^_j) v_j / sum_j (1 + q^_i . k^_j),    x^ = x / |x|

that is phi(x) = [x^, 1]. Li et al., 2020. O((N + M) D Dv) time. All weights are at least 0; a zero vector has x^ = 0. If a
query points away from all its keys, and they are not few (see `subquad.engines.kernelized`), all weights are close to 0 and the
quotient loses precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from subquad.engines.call import Call
from subquad.families.base import Info
from subquad.families.kernelized import MEMORY, STATE, TIME, Kernelized, refuses
from subquad.ops.feature_map import FeatureMap, NativeMap, unit_and_one
from subquad.ops.kernelized import KernelizedRule

INFO = Info(
    name="taylor",
    family="kernelized",
    engine="kernelized",
    idea="1 + cosine(q, k) as the weight: the first-order expansion of the softmax kernel on unit vectors",
    paper="Li et al., 2020, Linear Attention Mechanism: An Efficient Attention for Semantic Segmentation, arXiv:2007.14902",
    replaces_softmax=True,
    time=TIME,
    memory=MEMORY,
    state=STATE,
    refuses=refuses(scale="q and k are normalized to unit length, so a scale would have no effect"),
)


@dataclass(frozen=True, kw_only=True)
class Taylor(Kernelized):
    """First-order attention; no options."""

    info: ClassVar[Info] = INFO

    def rule(self, call: Call) -> KernelizedRule:
        feature_map = FeatureMap.symmetric(unit_and_one, call.key.shape[-1] + 1, NativeMap("unit"))
        return KernelizedRule(feature_map=replace(feature_map, is_signed=True))
