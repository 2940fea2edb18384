"""Feature maps that several mechanisms use, and learned feature maps with their parameters.

    hedgehog  phi(x) = [softmax(x W), softmax(-x W)]    W (D, D) starts as the identity
    t2r       phi(x) = relu(x W + b)                    W (D, m) starts random, alike for a query head and its keys; b at 0
    linear    phi(x) = elu(x) + 1                       has no parameters

Each query head has its own W and b, and so have the keys of each key-value head. x is the query or key or, with a `scale` c,
sqrt(c) times it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.step import StateView, Step
from subquad.errors import InputError
from subquad.families.base import Sizes
from subquad.families.kernelized import Kernelized
from subquad.masks import zero_pads
from subquad.ops.feature_map import NativeKind, NativeMap, known_map
from subquad.ops.kernelized import KernelizedRule
from subquad.ops.precision import upcast
from subquad.state import StateTensors

T2R_FEATURES = 32  # as in the paper


def require_positive_scale(scale: float | None, method: str) -> None:
    if scale is not None and scale <= 0:
        raise InputError(f"{method} takes the square root of scale, so scale must be above 0; got {scale}.")


class LearnedMap(ABC):
    """phi as a learned projection per head, which PyTorch applies, followed by a map that the compiled kernel has."""

    kind: ClassVar[NativeKind]

    @abstractmethod
    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        """`query_weight` (H, D, ...) and `key_weight` (K, D, ...), and `query_bias` and `key_bias` if the map has them."""

    def channels(self, head_dim: int) -> int:
        """Channels of a projected query or key."""
        return head_dim

    def project(self, x: Tensor, call: Call, side: Literal["query", "key"]) -> Tensor:
        """x (B, H or K, n, D), projected by the weight and bias of its head."""
        if call.scale is not None:
            x = x * math.sqrt(call.scale)
        weight, bias = call.weights.get(f"{side}_weight"), call.weights.get(f"{side}_bias")
        if weight is not None:
            x = x @ weight.to(x.dtype)
        return x if bias is None else x + bias.to(x.dtype).unsqueeze(1)


@dataclass(frozen=True)
class HedgehogMap(LearnedMap):
    kind: ClassVar[NativeKind] = "hedgehog"

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        heads = {"query_weight": sizes.heads, "key_weight": sizes.kv_heads}
        return {name: torch.eye(sizes.head_dim).repeat(count, 1, 1) for name, count in heads.items()}


@dataclass(frozen=True)
class T2RMap(LearnedMap):
    kind: ClassVar[NativeKind] = "relu"
    count: int = T2R_FEATURES

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        # With b = 0, about half of a row's features are above 0; with the same W for queries and keys, similar vectors have
        # similar features from the start.
        weight = torch.randn(sizes.kv_heads, sizes.head_dim, self.count) * sizes.head_dim**-0.5
        return {
            "query_weight": weight.repeat_interleave(sizes.heads // sizes.kv_heads, dim=0),
            "query_bias": torch.zeros(sizes.heads, self.count),
            "key_weight": weight,
            "key_bias": torch.zeros(sizes.kv_heads, self.count),
        }

    def channels(self, head_dim: int) -> int:
        return self.count


@dataclass(frozen=True)
class LinearMap(LearnedMap):
    kind: ClassVar[NativeKind] = "elu"

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        return {}


class LearnedKernelized(Kernelized):
    """A mechanism on the kernelized engine with a learned feature map."""

    @property
    @abstractmethod
    def learned_map(self) -> LearnedMap: ...

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        return self.learned_map.parameters(sizes)

    def rule(self, call: Call) -> KernelizedRule:
        channels = self.learned_map.channels(call.query.shape[-1])
        return KernelizedRule(feature_map=known_map(NativeMap(self.learned_map.kind), channels))

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        """Projects queries and keys here, because each query head has weights of its own and the engine groups query heads."""
        require_positive_scale(call.scale, self.info.name)
        # Zero the pads first: otherwise a NaN in one would reach the gradient of W.
        query = self._project(call.query, call, "query")
        key = self._project(zero_pads(call.key, call.key_padding_mask), call, "key")
        out, state = super().run(replace(call, query=query, key=key))
        return out.to(call.query.dtype), state

    def step(self, call: Call) -> Step | None:
        require_positive_scale(call.scale, self.info.name)
        inner = super().step(
            replace(call, query=self._project(call.query, call, "query"), key=self._project(call.key, call, "key"))
        )
        return None if inner is None else _ProjectedStep(inner, partial(self._project, call=call))

    def _project(self, x: Tensor, call: Call, side: Literal["query", "key"]) -> Tensor:
        return self.learned_map.project(upcast(x), call, side)


class _ProjectedStep(Step):
    """A step with the projected queries and keys."""

    def __init__(self, step: Step, project: Callable[..., Tensor]) -> None:
        self._step, self._project = step, project

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, past: StateView, seen: int, *, may_overwrite: bool
    ) -> tuple[Tensor, StateTensors, bool]:
        projected = self._project(query, side="query"), self._project(key, side="key")
        out, state, is_exclusive = self._step(*projected, value, past, seen, may_overwrite=may_overwrite)
        return out.to(query.dtype), state, is_exclusive


def needs_module(method: str, mechanism: str, learned: str) -> str:
    """Why a mechanism with parameters cannot be called as a plain function."""
    return (
        f"it learns {learned}; use subquad.Attention(dim, heads, method={method!r}) or "
        f"{mechanism}().build(heads=..., head_dim=...)"
    )
