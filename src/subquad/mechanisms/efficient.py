"""Efficient attention: two softmaxes, each over one sequence, instead of one over all pairs.

    o_i = sum_c softmax_c(q_i)_c g_c,    g_c = sum_j softmax_j(k_jc) v_j

The queries' softmax is over channels c, the keys' over positions j: channel c is one attention map over the source, and a query
mixes these maps. Shen et al., 2018. O((N + M) D Dv) time. The weights of a query sum to 1 already; there is no 1/sqrt(D).

The causal form is not in the paper: the softmax over positions runs over j <= i, with a running denominator per channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subquad.engines.call import Call
from subquad.families.base import Info
from subquad.families.kernelized import MEMORY, STATE, TIME, Kernelized, refuses
from subquad.ops.feature_map import FeatureMap, NativeMap
from subquad.ops.kernelized import KernelizedRule

INFO = Info(
    name="efficient",
    family="kernelized",
    engine="kernelized",
    idea="softmax over channels for queries and over positions for keys: each channel is one global attention map",
    paper="Shen et al., 2018, Efficient Attention: Attention with Linear Complexities, arXiv:1812.01243",
    replaces_softmax=True,
    time=TIME,
    memory=MEMORY,
    state=STATE,
    refuses=refuses(scale="its two softmaxes have no scale; multiply q and k before the call"),
)


@dataclass(frozen=True, kw_only=True)
class Efficient(Kernelized):
    """Efficient attention; no options."""

    info: ClassVar[Info] = INFO

    def rule(self, call: Call) -> KernelizedRule:
        feature_map = FeatureMap(
            query=lambda x: x.softmax(-1),
            key=lambda x: (None, x),  # e^x, each channel relative to its own running level
            features=call.key.shape[-1],
            native=NativeMap("softmax"),
        )
        return KernelizedRule(feature_map=feature_map, normalizer="channel")
