"""First-order attention: e^(q.k) replaced by its Taylor expansion on unit vectors.

    o_i = sum_j (1 + q^_i . k^_j) v_j / sum_j (1 + q^_i . k^_j),    x^ = x / |x|

that is phi(x) = [x^, 1]. Li et al., 2020. O((N + M) D Dv) time. All weights are at least 0; a zero vector has x^ = 0. Where a
query points against all its keys, all weights are near 0 and the quotient keeps few digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.kernelized import Kernel
from subquad.families.base import Info
from subquad.families.feature_maps import unit_vectors
from subquad.families.kernelized import MEMORY, STATE, TIME, Kernelized, refuses
from subquad.ops.kernelized import Map

INFO = Info(
    name="taylor",
    family="kernelized",
    engine="kernelized",
    idea="1 + cosine(q, k) as the weight: the softmax kernel's first-order expansion on unit vectors",
    paper="Li et al., 2020, Linear Attention Mechanism: An Efficient Attention for Semantic Segmentation, arXiv:2007.14902",
    replaces_softmax=True,
    time=TIME,
    memory=MEMORY,
    state=STATE,
    refuses=refuses(scale="q and k are brought to unit length, so a scale would have no effect"),
)


@dataclass(frozen=True, kw_only=True)
class Taylor(Kernelized):
    """First-order attention; it has no options."""

    info: ClassVar[Info] = INFO

    def kernel(self, call: Call) -> Kernel:
        return Kernel(query=_phi, key=lambda x: (_phi(x), None), features=call.key.shape[-1] + 1, compiled=Map("unit"))


def _phi(x: Tensor) -> Tensor:
    return torch.cat([unit_vectors(x), x.new_ones(*x.shape[:-1], 1)], dim=-1)
