"""The tensors of clustered attention.

B batch, H query heads, K key-value heads, N queries, M keys, D channels, Dv value channels, C clusters, k top keys.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ClusteredInputs(NamedTuple):
    """Queries (B, H, N, D) with their clusters, and keys (B, K, M, D) and values (B, K, M, Dv), which are 0 in pads."""

    query: Tensor
    key: Tensor
    value: Tensor
    assignment: Tensor  # (B, H, N) int64: the cluster of each query
    mask: Tensor | None  # (B, M) bool: which keys are real
    real: Tensor | None  # (B, N) bool: which queries are


class ClusterAttention(NamedTuple):
    """What the queries of a cluster share."""

    rest: Tensor  # (B, H, C, Dv): the weighted sum of all values but those of the top keys
    mass: Tensor  # (B, H, C): the weight of the top keys
    level: Tensor  # (B, H, C): the largest score; 0 without keys
    total: Tensor  # (B, H, C): the sum of e^(score - level)
    top: Tensor  # (B, H, C, k) int32: the top keys, ascending; -1 at the end where there are fewer
