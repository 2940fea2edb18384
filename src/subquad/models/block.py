"""The transformer block: self-attention, cross-attention if there is a source, feed-forward; each with a residual and a norm.

    pre-norm:   x + f(norm(x))          post-norm:   norm(x + f(x))

B batch, N tokens, M tokens of the source.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from subquad.layer import Attention, Source
from subquad.mechanisms import Config
from subquad.models.cache import Step, SubquadLayer
from subquad.models.configuration import SubquadConfig
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

    def __init__(self, config: SubquadConfig, method: Config, cross_method: Config | None) -> None:
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
        remembered: SubquadLayer | None,
        source: Tensor | None,
        source_mask: Tensor | None,
    ) -> tuple[Tensor, Step[State] | None, Source | None]:
        """x (B, N, dim); with a `remembered` past, what this layer is to remember from now on comes back beside it.

        Args:
            key_padding_mask: (B, N) bool.
            bias: added to the scores of self-attention, (B or 1, H, N, past + N).
            source, source_mask: (B, M, dim) and (B, M), for cross-attention.
        """
        step: Step[State] | None = None
        read: Source | None = None

        def attend(x: Tensor) -> Tensor:
            nonlocal step
            if remembered is None:
                return self.self_attn(x, is_causal=self.is_causal, key_padding_mask=key_padding_mask, attn_mask=bias)
            out, step = self._remember(x, key_padding_mask, bias, remembered.state)
            return out

        def attend_across(x: Tensor) -> Tensor:
            nonlocal read
            assert self.cross_attn is not None
            read = None if remembered is None else remembered.source
            if read is None:
                assert source is not None
                read = self.cross_attn.read(source, source_mask)
            return self.cross_attn(x, read)

        x = self._add(x, attend, self.self_attn_norm)
        if self.cross_attn_norm is not None:
            x = self._add(x, attend_across, self.cross_attn_norm)
        return self._add(x, self.feed_forward, self.feed_forward_norm), step, read

    def _add(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], norm: nn.Module) -> Tensor:
        if self.is_pre_norm:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))

    def _remember(
        self, x: Tensor, key_padding_mask: Tensor | None, bias: Tensor | None, before: State | None
    ) -> tuple[Tensor, Step[State]]:
        def run(x: Tensor, mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor, State]:
            return self.self_attn(x, is_causal=True, key_padding_mask=mask, attn_mask=bias, state=before, return_state=True)

        def again(keep: int) -> State:
            mask = None if key_padding_mask is None else key_padding_mask[:, :keep]
            return run(x[:, :keep], mask, None)[1]  # a bias changes the output, not the state

        out, state = run(x, key_padding_mask, bias)
        return out, Step(state, x.shape[1], again)


def _attention(config: SubquadConfig, method: Config, rotary: float | None) -> Attention:
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
