"""One checked call of a mechanism: what `attention` passes down to its engine.

B batch, H query heads, K key-value heads, N queries, M keys, D channels, Dv value channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from subquad.state import State, StateTensors, is_donated


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of `subquad.attention`, checked, and the weights of the mechanism. K divides H.

    Args:
        weights: the mechanism's buffers and parameters, by name.
        hidden: (B, M, dim), the tokens that the keys were projected from; for mechanisms that read them.
    """

    query: Tensor  # (B, H, N, D)
    key: Tensor  # (B, K, M, D)
    value: Tensor  # (B, K, M, Dv)
    is_causal: bool = False
    key_padding_mask: Tensor | None = None  # (B, M) bool
    attn_mask: Tensor | None = None  # broadcasts to (B, H, N, M); with a state, M counts its keys too
    scale: int | float | None = None
    dropout_p: float = 0.0
    state: State | None = None
    return_state: bool = False
    global_mask: Tensor | None = None  # (B, M) bool
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None

    @property
    def seen(self) -> int:
        """How many tokens the state has seen."""
        return 0 if self.state is None else self.state.length

    @property
    def past(self) -> StateTensors | None:
        """The tensors of the state, in a dictionary to change."""
        return None if self.state is None else dict(self.state.tensors)

    @property
    def is_donated_step(self) -> bool:
        """Whether a traced call continues a donated state with one token for each sequence, without pads."""
        if not torch.compiler.is_compiling() or self.state is None or not self.return_state:
            return False
        return is_donated(self.state) and self.query.shape[2] == 1 and self.key_padding_mask is None

    @property
    def softmax_scale(self) -> float:
        """The factor on q . k in softmax attention: `scale`, or 1/sqrt(D)."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def needs(self) -> tuple[str, ...]:
        """What this call requires of a mechanism, by the names in `subquad.families.base.NEEDS`."""
        required = {
            "is_causal": self.is_causal,
            "bidirectional": not self.is_causal,
            "cross": self.query.shape[2] != self.key.shape[2],
            "key_padding_mask": self.key_padding_mask is not None,
            "attn_mask": self.attn_mask is not None,
            "scale": self.scale is not None,
            "dropout_p": self.dropout_p > 0,
            "enable_gqa": self.query.shape[1] != self.key.shape[1],
            "decode": self.state is not None or self.return_state,
            "global_mask": self.global_mask is not None,
        }
        return tuple(need for need, is_required in required.items() if is_required)
