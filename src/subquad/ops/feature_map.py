"""Feature maps phi of kernelized attention: the PyTorch form and, beside it, the form that the compiled kernel has, if any.

B batch, K key-value heads, n tokens, D channels, m features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

NativeKind = Literal["elu", "identity", "unit", "exponential", "relu", "softmax", "trigonometric", "hedgehog"]


@dataclass(frozen=True)
class NativeMap:
    """A feature map that the compiled kernel knows (csrc/kernelized/features.h), with u = weight x + bias; without a weight,
    u = x + bias:

        elu            elu(x) + 1
        identity       scale x for queries, x for keys
        unit           [x / |x|, 1]
        exponential    e^(u - scale |x|^2 / 2 + constant)
        relu           relu(u) + constant
        softmax        softmax over channels for queries, over positions for keys
        trigonometric  scale [sin u, cos u] with u = weight x / |x|, or x without a weight
        hedgehog       [softmax(x), softmax(-x)] over channels

    Args:
        weight: (m, D); for "trigonometric" (K, m / 2, D).
        bias: (m,), or None for 0.
    """

    kind: NativeKind
    scale: float = 1.0
    constant: float = 0.0
    weight: Tensor | None = None
    bias: Tensor | None = None

    def features(self, channels: int) -> int:
        """m, for queries and keys of so many channels."""
        angles = channels if self.weight is None else self.weight.shape[-2]
        sizes = {"unit": channels + 1, "exponential": angles, "relu": angles, "trigonometric": 2 * angles}
        return {**sizes, "hedgehog": 2 * channels}.get(self.kind, channels)


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


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1, without the rounding of (e^x - 1) + 1, which turns small features into 0."""
    return x.relu() + x.clamp(max=0).exp_()


def unit_vectors(x: Tensor) -> Tensor:
    """x / |x|; a zero vector stays zero, with zero gradient."""
    # Divide by the largest entry first: the squares of very small or very large entries would leave the range of the dtype.
    largest = torch.maximum(x.detach().amax(-1, keepdim=True), -x.detach().amin(-1, keepdim=True))
    x = x / largest.masked_fill(largest == 0, 1.0)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x / norm.masked_fill(norm == 0, 1.0)).masked_fill(largest == 0, 0.0)


def known_map(native: NativeMap, channels: int) -> FeatureMap:
    """The map of the compiled kernel in PyTorch, for queries and keys (B, K, n, D) of so many channels."""
    weight, bias, scale = native.weight, native.bias, native.scale

    def angles(x: Tensor) -> Tensor:
        u = x if weight is None else x @ weight.to(x.dtype).mT
        return u if bias is None else u + bias.to(x.dtype)

    def exponential(x: Tensor) -> tuple[Tensor, Tensor]:
        u = angles(x)
        peak = u.detach().amax(-1, keepdim=True)
        return (u - peak).exp(), peak + native.constant - scale / 2 * x.square().sum(-1, keepdim=True)

    def sines(x: Tensor) -> Tensor:
        u = x if weight is None else angles(unit_vectors(x))
        return torch.cat([u.sin(), u.cos()], dim=-1) * scale

    features = native.features(channels)
    match native.kind:
        case "elu":
            return FeatureMap.symmetric(elu_plus_one, features, native)
        case "identity":
            return FeatureMap(query=lambda x: x * scale, key=lambda x: (x, None), features=features, native=native)
        case "unit":
            return FeatureMap.symmetric(unit_and_one, features, native)
        case "exponential":
            return FeatureMap(query=lambda x: exponential(x)[0], key=exponential, features=features, native=native)
        case "relu":
            return FeatureMap.symmetric(lambda x: angles(x).relu() + native.constant, features, native)
        case "softmax":
            return FeatureMap(query=lambda x: x.softmax(-1), key=lambda x: (None, x), features=features, native=native)
        case "trigonometric":
            return FeatureMap.symmetric(sines, features, native)
        case "hedgehog":
            return FeatureMap.symmetric(lambda x: torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1), features, native)


def unit_and_one(x: Tensor) -> Tensor:
    """[x / |x|, 1]."""
    return torch.cat([unit_vectors(x), x.new_ones(*x.shape[:-1], 1)], dim=-1)
