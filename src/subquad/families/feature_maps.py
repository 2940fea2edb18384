"""Feature maps that are learned, each with its parameters: what stands for softmax attention in a model that is converted.

    hedgehog  phi(x) = [softmax(x W), softmax(-x W)]    W (D, D) starts as the identity
    t2r       phi(x) = relu(x W + b)                    W (D, m) starts at random, alike for a query head and its keys; b at 0
    linear    phi(x) = elu(x) + 1                       nothing learned

Queries have a W and b for each query head, keys for each key-value head. x is the query or key as it is or, given a `scale` c,
sqrt(c) times it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.kernelized import Kernel
from subquad.errors import InputError
from subquad.families.base import Sizes
from subquad.families.kernelized import Kernelized
from subquad.masks import zero_pads
from subquad.ops.precision import upcast
from subquad.state import StateTensors

FEATURES = 32  # of t2r: the paper's number


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1, without the rounding of (e^x - 1) + 1, which turns small features into 0."""
    return x.relu() + x.clamp(max=0).exp_()


def unit_vectors(x: Tensor) -> Tensor:
    """x / |x|; a zero vector stays zero, with zero gradient."""
    # Divide by the largest entry first: the squares of very small or very large entries would leave the range of the dtype.
    largest = torch.maximum(x.detach().amax(-1, keepdim=True), -x.detach().amin(-1, keepdim=True))
    x = x / largest.masked_fill(largest == 0, 1.0)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.masked_fill(norm == 0, 1.0)


class FeatureMap(ABC):
    """phi, as a projection by each head and then a function of channels."""

    @abstractmethod
    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        """`query_weight` (H, D, ...) and `key_weight` (K, D, ...), and biases where there are any."""

    @abstractmethod
    def features(self, head_dim: int) -> int:
        """m."""

    @abstractmethod
    def phi(self, x: Tensor) -> Tensor:
        """The features (..., m) of what is projected."""


@dataclass(frozen=True)
class HedgehogMap(FeatureMap):
    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        heads = {"query_weight": sizes.heads, "key_weight": sizes.kv_heads}
        return {name: torch.eye(sizes.head_dim).repeat(count, 1, 1) for name, count in heads.items()}

    def features(self, head_dim: int) -> int:
        return 2 * head_dim

    def phi(self, x: Tensor) -> Tensor:
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1)


@dataclass(frozen=True)
class T2RMap(FeatureMap):
    count: int = FEATURES

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        # With b = 0 about half of the features of a row are above 0; with one W on both sides, like meets like from the start.
        weight = torch.randn(sizes.kv_heads, sizes.head_dim, self.count) * sizes.head_dim**-0.5
        return {
            "query_weight": weight.repeat_interleave(sizes.heads // sizes.kv_heads, dim=0),
            "query_bias": torch.zeros(sizes.heads, self.count),
            "key_weight": weight,
            "key_bias": torch.zeros(sizes.kv_heads, self.count),
        }

    def features(self, head_dim: int) -> int:
        return self.count

    def phi(self, x: Tensor) -> Tensor:
        return x.relu()


@dataclass(frozen=True)
class LinearMap(FeatureMap):
    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        return {}

    def features(self, head_dim: int) -> int:
        return head_dim

    def phi(self, x: Tensor) -> Tensor:
        return elu_plus_one(x)


def project(x: Tensor, call: Call, side: Literal["query", "key"], name: str) -> Tensor:
    """What `phi` takes: x (B, H or K, n, D) by the matrix and the bias of its head, where the map has them."""
    if call.scale is not None:
        if call.scale <= 0:
            raise InputError(f"{name} takes the square root of scale, so scale must be above 0; got {call.scale}.")
        x = x * math.sqrt(call.scale)
    weight, bias = call.weights.get(f"{side}_weight"), call.weights.get(f"{side}_bias")
    if weight is not None:
        x = x @ weight.to(x.dtype)
    return x if bias is None else x + bias.to(x.dtype).unsqueeze(1)


class Mapped(Kernelized):
    """A mechanism on the kernelized engine whose features are a learned map's."""

    @property
    @abstractmethod
    def feature_map(self) -> FeatureMap: ...

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        return self.feature_map.parameters(sizes)

    def kernel(self, call: Call) -> Kernel:
        phi = self.feature_map.phi
        return Kernel(query=phi, key=lambda x: (phi(x), None), features=self.feature_map.features(call.query.shape[-1]))

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        """Projects each head here, since the engine's maps know no query heads."""
        # Pads are 0 before the product, or a NaN in one would reach the gradient of W.
        query, key = upcast(call.query), upcast(zero_pads(call.key, call.key_padding_mask))
        query, key = project(query, call, "query", self.info.name), project(key, call, "key", self.info.name)
        out, parts = super().run(replace(call, query=query, key=key))
        return out.to(call.query.dtype), parts


def functional(method: str, config: str, learns: str) -> str:
    """Why a mechanism with a learned map is not a plain function."""
    return (
        f"it learns {learns}; use subquad.Attention(dim, heads, method='{method}') or {config}().build(heads=..., head_dim=...)"
    )
