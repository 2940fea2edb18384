"""Attention without softmax: the dot products themselves as weights.

    o_i = scale_i sum_j (q_i . k_j) v_j,    scale_i = 1 / (D n_i), n_i the number of keys that query i may attend to

so phi(x) = x and there is no denominator. With `normalize="none"` the scale is the constant 1/D: Q (K^T V) / D.
O((N + M) D Dv) time. The division by n_i is not in the paper: it keeps the size of the output independent of the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from subquad.engines.call import Call
from subquad.families.base import Info
from subquad.families.kernelized import MEMORY, STATE, TIME, Kernelized, refuses
from subquad.ops.feature_map import FeatureMap, NativeMap
from subquad.ops.kernelized import KernelizedRule

INFO = Info(
    name="plain",
    family="kernelized",
    engine="kernelized",
    idea="no softmax at all: Q (K^T V), scaled",
    paper="Shen et al., 2018, Efficient Attention (the scaling variant), arXiv:1812.01243",
    replaces_softmax=True,
    time=TIME,
    memory=MEMORY,
    state=STATE,
    refuses=refuses(),
)


@dataclass(frozen=True, kw_only=True)
class Plain(Kernelized):
    """Attention without softmax.

    Args:
        normalize: the default scale: "count" for 1 / (D n_i), "none" for 1 / D. A `scale` in the call replaces either.
    """

    info: ClassVar[Info] = INFO
    normalize: Literal["count", "none"] = "count"

    def __post_init__(self) -> None:
        self._require_choice("normalize", ("count", "none"))

    def rule(self, call: Call) -> KernelizedRule:
        head_dim = call.key.shape[-1]
        scale = 1 / head_dim if call.scale is None else call.scale
        feature_map = FeatureMap(
            query=lambda x: x * scale,
            key=lambda x: (x, None),
            features=head_dim,
            native=NativeMap("identity", scale=scale),
        )
        is_mean = self.normalize == "count" and call.scale is None
        return KernelizedRule(feature_map=feature_map, normalizer="mean" if is_mean else "none")
