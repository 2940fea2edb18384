"""Linear attention: the softmax kernel replaced by a product of positive features.

    o_i = phi(q_i) sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)),    phi(x) = elu(x) + 1

Katharopoulos et al., 2020. O((N + M) D Dv) time, a (D, Dv) state. There is no 1/sqrt(D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subquad.engines.call import Call
from subquad.engines.kernelized import Kernel
from subquad.families.base import Info
from subquad.families.feature_maps import elu_plus_one
from subquad.families.kernelized import MEMORY, STATE, TIME, Kernelized, refuses
from subquad.ops.kernelized import Map

INFO = Info(
    name="linear",
    family="kernelized",
    engine="kernelized",
    idea="elu(x) + 1 as features, so the sum over keys is computed once for all queries",
    paper="Katharopoulos et al., 2020, Transformers are RNNs, arXiv:2006.16236",
    replaces_softmax=True,
    time=TIME,
    memory=MEMORY,
    state=STATE,
    refuses=refuses(scale="its features take q and k as they are; multiply q and k yourself"),
)


@dataclass(frozen=True, kw_only=True)
class Linear(Kernelized):
    """Linear attention; it has no options."""

    info: ClassVar[Info] = INFO

    def kernel(self, call: Call) -> Kernel:
        return Kernel(
            query=elu_plus_one, key=lambda x: (elu_plus_one(x), None), features=call.key.shape[-1], compiled=Map("elu")
        )
