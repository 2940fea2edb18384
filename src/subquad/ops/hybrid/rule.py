"""What a call of hybrid attention consists of.

B batch, H query heads, K key-value heads, n tokens, D channels, Dv value channels, P channels of a projected query or key.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from subquad.ops.feature_map import FeatureMap, NativeKind, NativeMap, known_map


class Inputs(NamedTuple):
    """The tensors of a call."""

    query: Tensor  # (B, H, n, D)
    key: Tensor  # (B, K, n, D)
    value: Tensor  # (B, K, n, Dv)
    projected_query: Tensor  # (B, H, n, P), which phi is applied to
    projected_key: Tensor  # (B, K, n, P)
    mask: Tensor | None  # (B, n) bool, True for real tokens, which come first
    log_mix: Tensor  # (H,), or (B, H) in the PyTorch body: log g


class HybridRule(NamedTuple):
    """How near and far keys are weighed.

    Args:
        kind: phi >= 0, a map that has no weights and gives phi = f.
        window: the largest distance of a near key.
        scale: s, the factor on q . k for near keys.
        is_causal: a query attends to its own key and those before it.
    """

    kind: NativeKind
    window: int
    scale: float
    is_causal: bool

    def feature_map(self, channels: int) -> FeatureMap:
        """phi, of projected queries and keys of so many channels."""
        return known_map(NativeMap(self.kind), channels)
