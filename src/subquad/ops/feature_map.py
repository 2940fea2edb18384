"""Feature maps phi of kernelized attention: the PyTorch form and, beside it, the form that the compiled kernel has, if any.

B batch, K key-value heads, n tokens, D channels, m features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

NativeKind = Literal["elu", "identity", "unit", "exponential", "relu", "softmax", "trigonometric"]


@dataclass(frozen=True)
class NativeMap:
    """A feature map that the compiled kernel knows (csrc/kernelized/features.h), with u = weight x + bias:

        elu            elu(x) + 1
        identity       scale x for queries, x for keys
        unit           [x / |x|, 1]
        exponential    e^(u - scale |x|^2 / 2 + constant)
        relu           relu(u) + 0.001
        softmax        softmax over channels for queries, over positions for keys
        trigonometric  scale [sin u, cos u] with u = weight x / |x|, or u = x without a weight

    Args:
        weight: (m, D); for "trigonometric" (K, m / 2, D).
        bias: (m,), or None for 0.
    """

    kind: NativeKind
    scale: float = 1.0
    constant: float = 0.0
    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class FeatureMap:
    """phi of queries and of keys.

    Args:
        query: maps (B, K, n, D) to (B, K, n, m): phi up to a factor for each query, which cancels.
        key: maps (B, K, n, D) to f and b, where phi = e^b f. f is (B, K, n, m), and b is None for 0 or (B, K, n, 1). With the
            normalizer "channel", f is None for 1, and b is (B, K, n, m).
        features: m.
        projection: applied to queries and keys (B, K, n, D) before `query` and `key`; None for nothing.
        weights: the tensors that these functions read. Those that a projection reads can be trained with the compiled kernel.
        native: the same map, projection included, in the compiled kernel; None if the kernel does not have it.
        is_signed: features may be negative, so that the sums over keys cancel.
    """

    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], tuple[Tensor | None, Tensor | None]]
    features: int
    projection: Callable[[Tensor], Tensor] | None = None
    weights: tuple[Tensor, ...] = ()
    native: NativeMap | None = None
    is_signed: bool = False

    @classmethod
    def symmetric(cls, phi: Callable[[Tensor], Tensor], features: int, native: NativeMap | None = None) -> FeatureMap:
        """One function for queries and keys."""
        return cls(query=phi, key=lambda x: (phi(x), None), features=features, native=native)

    def project(self, x: Tensor) -> Tensor:
        return x if self.projection is None else self.projection(x)

    def after_projection(self) -> FeatureMap:
        """The map that is left for queries and keys that have been projected already."""
        native = None if self.native is None else replace(self.native, weight=None)
        return replace(self, projection=None, weights=(), native=native)
