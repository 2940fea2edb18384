"""The transformer block: self-attention, cross-attention if there is a source, feed-forward; each with a residual and a norm.

    pre-norm:   x + f(norm(x))          post-norm:   norm(x + f(x))

B batch, N tokens, M tokens of the source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from subquad.families.base import Mechanism
from subquad.layer import Attention, Source
from subquad.models.cache import SubquadLayer, Update
from subquad.models.configuration import SubquadConfig
from subquad.rotary import Rotation
from subquad.state import State

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swiglu": F.silu}


class FeedForward(nn.Module):
    """W2 act(W1 x), or W2 (silu(W1 x) * W3 x) for SwiGLU (Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__()
        dim, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.act = _ACTIVATIONS[config.hidden_act]
        self.up_proj = nn.Linear(dim, inner, bias=bias)
        self.gate_proj = nn.Linear(dim, inner, bias=bias) if config.hidden_act == "swiglu" else None
        self.down_proj = nn.Linear(inner, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        return self.down_proj(self.act(up) if self.gate_proj is None else self.act(self.gate_proj(x)) * up)


def norm(config: SubquadConfig) -> nn.Module:
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)


class Block(GradientCheckpointingLayer):
    """One layer of a transformer."""

    def __init__(self, config: SubquadConfig, method: Mechanism, cross_method: Mechanism | None) -> None:
        super().__init__()
        self.is_causal = config.is_decoder
        self.is_pre_norm = config.norm_position == "pre"
        self.self_attn = _attention(config, method, rotary=config.rope_theta if config.position == "rotary" else None)
        self.self_attn_norm = norm(config)
        self.cross_attn = None if cross_method is None else _attention(config, cross_method, rotary=None)
        self.cross_attn_norm = None if cross_method is None else norm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None,
        bias: Tensor | None,
        cache: SubquadLayer | None,
        source: Tensor | None,
        source_mask: Tensor | None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Update[State] | None, Source | None]:
        """The output (B, N, dim) for x (B, N, dim); then, for the cache, the new state, and the keys and values of the source.

        Args:
            key_padding_mask: (B, N) bool.
            bias: added to the scores of self-attention, (B or 1, H, N, past + N).
            source, source_mask: (B, M, dim) and (B, M), for cross-attention.
            rotation: the rotary positions of the tokens, if the model has them.
        """
        out, update = self._attend(self._enter(x, self.self_attn_norm), key_padding_mask, bias, rotation, cache)
        x = self._leave(x, out, self.self_attn_norm)
        keys = None
        if self.cross_attn is not None and self.cross_attn_norm is not None:
            keys = None if cache is None else cache.source
            if keys is None:
                assert source is not None
                keys = self.cross_attn.read(source, source_mask)
            x = self._leave(x, self.cross_attn(self._enter(x, self.cross_attn_norm), keys), self.cross_attn_norm)
        out = self.feed_forward(self._enter(x, self.feed_forward_norm))
        return self._leave(x, out, self.feed_forward_norm), update, keys

    def _enter(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(x) if self.is_pre_norm else x

    def _leave(self, x: Tensor, out: Tensor, norm: nn.Module) -> Tensor:
        x = x + self.dropout(out)
        return x if self.is_pre_norm else norm(x)

    def _attend(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None,
        bias: Tensor | None,
        rotation: Rotation | None,
        cache: SubquadLayer | None,
    ) -> tuple[Tensor, Update[State] | None]:
        if cache is None:
            options: dict[str, Any] = {"is_causal": self.is_causal, "attn_mask": bias, "rotation": rotation}
            return self.self_attn(x, key_padding_mask=key_padding_mask, **options), None
        before = cache.state

        def recompute(keep: int) -> State:
            mask = None if key_padding_mask is None else key_padding_mask[:, :keep]
            _, state = self.self_attn(x[:, :keep], is_causal=True, key_padding_mask=mask, state=before, return_state=True)
            return state

        out, state = self.self_attn(
            x,
            is_causal=True,
            key_padding_mask=key_padding_mask,
            attn_mask=bias,
            rotation=rotation,
            state=cache.past.to_replace(),
            return_state=True,
        )
        return out, Update(state, x.shape[1], recompute)


def _attention(config: SubquadConfig, method: Mechanism, rotary: float | None) -> Attention:
    return Attention(
        config.hidden_size,
        config.num_attention_heads,
        method,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        bias=config.attention_bias,
        dropout=config.attention_dropout,
        rotary=rotary,
    )
