"""What a kernelized mechanism states to its engine, and what a call of the operator consists of.

B batch, H query heads, K key-value heads, N queries, M keys, D channels, Dv value channels, m features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from subquad.errors import InputError
from subquad.ops.feature_map import FeatureMap

Normalizer = Literal["sum", "mean", "none", "channel", "signed"]
Sums = dict[str, Tensor]
# The sums over the keys so far. S (B, K, m, Dv + 1), or (B, K, m, Dv) without a column of ones; level (B, K, 1, 1 or m), the
# largest b so far, for maps phi = e^b f; count (B, 1, 1, 1), the number of keys, with the normalizer "mean".


class Inputs(NamedTuple):
    """The tensors of a call."""

    query: Tensor  # (B, H, N, D)
    key: Tensor  # (B, K, M, D)
    value: Tensor  # (B, K, M, Dv)
    mask: Tensor | None  # (B, M) bool, True for real tokens
    is_causal: bool


@dataclass(frozen=True, kw_only=True)
class KernelizedRule:
    """How a kernelized mechanism weighs keys; the mechanism passes it to the engine.

    Args:
        feature_map: phi.
        normalizer: "sum" divides by phi(q) . z; "signed" does too, but keeps the magnitude of the denominator at `floor` or
            above, for maps with negative features; "mean" divides by the number of keys; "channel" divides each feature of the
            query by its own z; "none" does not divide.
        floor: see "signed".
        log_decay: (B, K, M), the logarithm of a gate g: `S <- g S + phi(k) v^T` at each token. Causal calls only.
        write: (B, K, M), a factor w on what a token adds: `S <- g S + w phi(k) v^T`; None for 1.
    """

    feature_map: FeatureMap
    normalizer: Normalizer = "sum"
    floor: float = 0.0
    log_decay: Tensor | None = None
    write: Tensor | None = None

    def __post_init__(self) -> None:
        if self.feature_map.native is not None and (self.log_decay is not None or self.write is not None):
            raise InputError(
                "a feature map with log_decay or write cannot have a native form, because the compiled kernel would ignore "
                f"them; got native={self.feature_map.native.kind!r}. Pass FeatureMap(native=None, ...)."
            )

    @property
    def has_ones(self) -> bool:
        """Whether values carry a column of ones, so that z is the last column of S."""
        return self.normalizer in ("sum", "signed", "channel")
