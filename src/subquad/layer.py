"""`Attention`: a layer with projections, around any mechanism.

B batch, H query heads, K key-value heads, N queries, M keys, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from subquad import checks
from subquad.attention import MechanismModule, described
from subquad.engines import state_spec
from subquad.engines.state_spec import TensorSpec
from subquad.errors import InputError
from subquad.families.base import Mechanism
from subquad.registry import require
from subquad.rotary import Rotation, cos_sin, positions, rotate_by
from subquad.state import State, is_checked, renamed


@dataclass(frozen=True, eq=False)
class Source:
    """The keys and values of a sequence for cross-attention, projected once; `Attention.read` makes one."""

    key: Tensor  # (B, K, M, D)
    value: Tensor
    key_padding_mask: Tensor | None  # (B, M)
    hidden: Tensor | None  # (B, M, source_dim), for mechanisms that read the tokens

    @property
    def nbytes(self) -> int:
        """The size of its tensors in bytes."""
        return sum(x.nbytes for x in self._tensors if x is not None)

    def reorder(self, index: Tensor) -> Source:
        """The batch rows `index`, as beam search needs them."""
        return Source(*(None if x is None else x.index_select(0, index.to(x.device)) for x in self._tensors))  # type: ignore[arg-type]

    @property
    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.key, self.value, self.key_padding_mask, self.hidden


class Attention(nn.Module):
    """Multi-head self- or cross-attention with projections, for any mechanism.

    Args:
        dim: width of the tokens.
        heads: H; each has `head_dim` channels (default dim / heads).
        method: a name from `subquad.methods()`, or a mechanism.
        kv_heads: K, a divisor of `heads` (default heads). Groups of query heads share the keys and values of one head.
        source_dim: width of `source` in cross-attention (default dim).
        bias: whether the projections have a bias.
        dropout: probability of dropping an attention weight in training, for mechanisms that have attention weights.
        rotary: the base of rotary positions, usually 10000.0; None for no rotary positions. Self-attention only.
        scale: replaces the mechanism's own factor on q . k.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        method: str | Mechanism = "softmax",
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        source_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        rotary: float | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        source_dim = dim if source_dim is None else source_dim
        checks.sizes(dim=dim, heads=heads, source_dim=source_dim)
        if head_dim is None and dim % heads:
            raise InputError(
                f"dim must be a multiple of heads unless head_dim is given; got dim={dim}, heads={heads}. "
                f"Pass head_dim, or a dim that is a multiple of {heads}."
            )
        head_dim = dim // heads if head_dim is None else head_dim
        self.mechanism = MechanismModule(method, heads=heads, head_dim=head_dim, kv_heads=kv_heads, dim=source_dim)
        checks.dropout(dropout)
        checks.scale(scale)
        grouped = self.mechanism.sizes.kv_heads != heads
        asked = {"dropout_p": dropout > 0, "scale": scale is not None, "enable_gqa": grouped}
        require(self.mechanism.method, [need for need, is_asked in asked.items() if is_asked])
        if source_dim != dim and "cross" in self.mechanism.method.refuses:
            require(self.mechanism.method, ["cross"])
        checks.rotary(rotary, head_dim)
        if rotary is not None and source_dim != dim:
            raise InputError(f"rotary positions need self-attention, so source_dim must equal dim; got {source_dim} and {dim}.")
        checks.flag("bias", bias)
        self.dropout = dropout
        self.rotary = None if rotary is None else float(rotary)
        self._suffix = f" with rotary={self.rotary}"  # text, because a traced call may take numbers for symbols
        self.scale = scale
        sizes = self.mechanism.sizes
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=bias)
        shared = self.mechanism.method.shares_query_and_key
        self.k_proj = None if shared else nn.Linear(source_dim, sizes.kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(source_dim, sizes.kv_heads * head_dim, bias=bias)
        self.out_proj = nn.Linear(heads * head_dim, dim, bias=bias)

    def forward(
        self,
        x: Tensor,
        source: Tensor | Source | None = None,
        *,
        is_causal: bool = False,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
        global_mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Any:
        """Attend from x (B, N, dim) to itself or to a `source`: a tensor (B, M, source_dim), or a `Source` from `read`.

        The other arguments and the result are those of `attention`; `key_padding_mask` belongs to the source. `rotation`: the
        rotary positions of the tokens, from a model that computes them once for all layers; None: this layer computes them.
        """
        checks.tokens("x", x, self.q_proj.in_features, self.q_proj.weight)
        if source is None:
            checks.tokens("x, without a source,", x, self.v_proj.in_features)
            x = _without_pads(x, key_padding_mask)
        elif not is_causal or self.k_proj is None:
            require(self.mechanism.method, ["cross"])
        sizes = self.mechanism.sizes
        q = self.q_proj(x).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)  # (B, H, N, D)
        if source is None:
            keys = self._project(x, key_padding_mask, q)
        elif isinstance(source, Source):
            if key_padding_mask is not None:
                raise InputError("a Source has its own key_padding_mask; got another one. Pass the mask to read() only.")
            keys = source
        else:
            keys = self._read(source, key_padding_mask)
        k = keys.key
        after = None
        if self.rotary is not None:
            state, start = self._take_position(state, x)
            if rotation is None:
                position, after = positions(start, x.shape[1], key_padding_mask)
                rotation = Rotation(*cos_sin(q, position, self.rotary), after)
            rotated = rotate_by(q, rotation.cos, rotation.sin)
            q, k = rotated, rotated if k is q else rotate_by(k, rotation.cos, rotation.sin)
            after = rotation.after.clone()  # a compiler would compile again for states that share a tensor
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(q.dtype)  # under autocast the queries differ in precision from the layer
        out = self.mechanism(
            q,
            k,
            keys.value,
            is_causal=is_causal,
            key_padding_mask=keys.key_padding_mask,
            attn_mask=attn_mask,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            state=state,
            return_state=return_state,
            global_mask=global_mask,
            hidden=keys.hidden,
        )
        out, new = out if return_state else (out, None)
        out = self.out_proj(out.transpose(1, 2).flatten(-2))  # (B, N, dim)
        if after is not None and new is not None:
            new = renamed(new, self._method, {**new.tensors, "position": after})
        return (out, new) if return_state else out

    def read(self, source: Tensor, key_padding_mask: Tensor | None = None) -> Source:
        """Project `source` (B, M, source_dim) to keys and values once, for many calls that attend to it."""
        require(self.mechanism.method, ["cross"])
        return self._read(source, key_padding_mask)

    def _read(self, source: Tensor, key_padding_mask: Tensor | None) -> Source:
        checks.tokens("source", source, self.v_proj.in_features, self.q_proj.weight)
        if self.rotary is not None:
            raise InputError(
                "rotary positions need self-attention, because they relate tokens of one sequence; got a source. "
                "Build the layer with rotary=None."
            )
        return self._project(_without_pads(source, key_padding_mask), key_padding_mask, None)

    def _project(self, source: Tensor, key_padding_mask: Tensor | None, query: Tensor | None) -> Source:
        """Keys and values (B, K, M, D). In self-attention, `query` is the key too if the mechanism shares them."""
        kv_heads = self.mechanism.sizes.kv_heads
        if self.k_proj is None:
            assert query is not None
            key = query
        else:
            key = self.k_proj(source).unflatten(-1, (kv_heads, -1)).transpose(1, 2)
        value = self.v_proj(source).unflatten(-1, (kv_heads, -1)).transpose(1, 2)
        return Source(key, value, key_padding_mask, source if self.mechanism.method.reads_tokens else None)

    @property
    def _method(self) -> str:
        return described(self.mechanism.method, self.scale) + self._suffix

    def _take_position(self, state: State | None, x: Tensor) -> tuple[State | None, Tensor]:
        """The state of the mechanism without the position, and the position (B,) of the next token of each row."""
        if state is None:
            return None, torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        checks.plausible_state(state)
        checks.state_owner(state, self._method, x)
        start = state.tensors.get("position")
        if not is_checked(state):
            own = {} if start is None else {"position": start}
            state_spec.check(replace(state, tensors=own), {"position": TensorSpec((), torch.int64, range=(0, state.length))})
        assert isinstance(start, Tensor)
        tensors = {name: tensor for name, tensor in state.tensors.items() if name != "position"}
        return renamed(state, described(self.mechanism.method, self.scale), tensors), start

    def extra_repr(self) -> str:
        return f"rotary={self.rotary}, dropout={self.dropout}, scale={self.scale}"


def _without_pads(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """x with its pads set to 0: a NaN in one would reach the gradients of the projections."""
    if key_padding_mask is None:
        return x
    checks.padding(key_padding_mask, (x.shape[0], x.shape[1]), x.device)
    return x.masked_fill(~key_padding_mask.unsqueeze(-1), 0)
