"""Linear attention with squared ReLU features: an example of a mechanism in a package of its own.

o_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j),    phi(x) = relu(x)^2 + floor
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from subquad import Info
from subquad.engines.call import Call
from subquad.families.kernelized import MEMORY, STATE, TIME, Kernelized, refuses
from subquad.ops.feature_map import FeatureMap
from subquad.ops.kernelized import KernelizedRule


def reference(mechanism: Any, query: Tensor, key: Tensor, value: Tensor, *, allowed: Tensor, **_: Any) -> Tensor:
    """The formula, over all pairs; `allowed` (B, 1, N, M) is True where a query may see a key."""
    features = [x.clamp(min=0) ** 2 + mechanism.floor for x in (query, key)]
    weights = features[0] @ features[1].mT * allowed  # (B, H, N, M)
    total = weights.sum(-1, keepdim=True)
    return weights @ value / total.masked_fill(total == 0, 1)


@dataclass(frozen=True, kw_only=True)
class SquaredReLU(Kernelized):
    """Linear attention with squared ReLU features.

    Args:
        floor: what is added to every feature, so that no query has all its weights at zero.
    """

    info: ClassVar[Info] = Info(
        name="squared_relu",
        family="kernelized",
        engine="kernelized",
        idea="relu(x)^2 as the feature map, so that one sum over the keys serves all queries",
        paper="an example",
        replaces_softmax=True,
        time=TIME,
        memory=MEMORY,
        state=STATE,
        refuses=refuses(scale="its feature map has no scale; multiply q and k before the call"),
    )
    reference: ClassVar[Any] = reference
    floor: float = 0.01

    def __post_init__(self) -> None:
        self._require_positive("floor")

    def rule(self, call: Call) -> KernelizedRule:
        return KernelizedRule(feature_map=FeatureMap.symmetric(self.phi, features=call.key.shape[-1]))

    def phi(self, x: Tensor) -> Tensor:
        return x.relu().square() + self.floor
