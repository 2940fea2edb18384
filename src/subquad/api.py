"""`attention` and `Attention`: the one way in. All input is checked here, by the rules in `checks`.

B batch, H query heads, K key-value heads, N queries, M keys, D channels, Dv value channels.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from subquad import checks
from subquad.errors import InputError, OptionError
from subquad.mechanisms import Call, Config, Spec
from subquad.registry import require, resolve
from subquad.rotary import positions, rotate
from subquad.state import State


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    method: str | Config = "softmax",
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    state: State | None = None,
    return_state: bool = False,
    global_mask: Tensor | None = None,
) -> Any:
    """Attention by any mechanism, with the shapes and names of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: (B, H, N, D).
        key, value: (B, K, M, D) and (B, K, M, Dv). K is H, or with `enable_gqa` a divisor of H.
        method: a name from `subquad.methods()`, or a config object such as `subquad.Performer(features=128)`.
        is_causal: query i attends to keys 0 to i, and to all that `state` holds. Needs N = M.
        key_padding_mask: (B, M) bool, True for real tokens. What stands in the others never matters.
        attn_mask: bool (True = may attend) or added to the scores; broadcasts to (B, H, N, M), where M counts the keys in
            `state` too.
        scale: replaces the mechanism's own factor on q . k.
        enable_gqa: allow fewer key-value heads than query heads.
        dropout_p: probability of dropping an attention weight.
        state: what an earlier causal call returned; this call goes on from there. It is not changed.
        return_state: return `(output, state)`.
        global_mask: (B, M) bool, for mechanisms with global tokens: True for tokens that see all, and that all see.

    Returns:
        (B, H, N, Dv), zero for queries that may attend to nothing; or `(output, state)`. The precision is that of the inputs,
        under autocast too, and sums are kept in float32 at least.

    Raises:
        SubquadError: the inputs do not fit together, or the mechanism cannot do what is asked.
    """
    config = resolve(method)
    checks.flag("enable_gqa", enable_gqa)
    checks.tensors(query, key, value, enable_gqa=enable_gqa)
    weights: dict[str, Tensor] = {}
    if config.info.random:
        sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        dtype = torch.promote_types(query.dtype, torch.float32)
        weights = _drawn(config, *sizes, query.device, dtype, type(query) is Tensor)
    call = Call(
        query=query,
        key=key,
        value=value,
        is_causal=is_causal,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        scale=scale,
        dropout_p=dropout_p,
        state=state,
        return_state=return_state,
        weights=weights,
        global_mask=global_mask,
    )
    return _run(config, call, "functional")


class Mechanism(nn.Module):
    """A mechanism with its buffers and parameters, called like `attention`. `config.build(...)` makes one.

    Args:
        method: a name or a config object.
        heads, head_dim, kv_heads, value_dim: H, D, K (default H) and Dv (default D).
        dim: the width of the tokens, for mechanisms that read them.
    """

    def __init__(
        self,
        method: str | Config,
        *,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        dim: int | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        value_dim = head_dim if value_dim is None else value_dim
        checks.sizes(heads=heads, head_dim=head_dim, kv_heads=kv_heads, value_dim=value_dim, dim=1 if dim is None else dim)
        checks.divides(heads, kv_heads)
        self.config = resolve(method)
        self.spec = Spec(heads, kv_heads, head_dim, value_dim, dim)
        for name, parameter in self.config.parameters(self.spec).items():
            self.register_parameter(name, nn.Parameter(parameter))
        default = torch.empty(0)  # its device and dtype are the current defaults
        for name, buffer in self.config.buffers(self.spec).items():
            self.register_buffer(name, _as(buffer, default.device, default.dtype))
        if self.config.info.random:
            self.register_buffer("seed", torch.tensor(self.config.seed))  # type: ignore[attr-defined]
            self.register_load_state_dict_post_hook(_take_seed)  # type: ignore[no-untyped-call]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        state: State | None = None,
        return_state: bool = False,
        global_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Any:
        """As `attention`; `hidden` (B, M, dim) are the tokens, for mechanisms that read them."""
        checks.tensors(query, key, value, enable_gqa=True)
        spec, name = self.spec, self.config.info.name
        if (query.shape[1], key.shape[1], query.shape[3]) != (spec.heads, spec.kv_heads, spec.head_dim):
            raise InputError(
                f"{name} was built for heads={spec.heads}, kv_heads={spec.kv_heads}, head_dim={spec.head_dim}; "
                f"got query {tuple(query.shape)} and key {tuple(key.shape)}. Build another one for these sizes."
            )
        if self.config.fixes_value_dim and value.shape[3] != spec.value_dim:
            raise InputError(f"{name} was built for value_dim={spec.value_dim}; got value {tuple(value.shape)}.")
        checks.hidden(hidden, key, spec.dim if self.config.reads_tokens else None, name)
        call = Call(
            query=query,
            key=key,
            value=value,
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            scale=scale,
            dropout_p=dropout_p,
            state=state,
            return_state=return_state,
            weights=dict(self.named_parameters()) | dict(self.named_buffers()),
            hidden=hidden,
            global_mask=global_mask,
        )
        result = _run(self.config, call)
        if self.training and self.config.info.updates and "decode" not in call.needs:
            with torch.no_grad():
                for buffer, new in self.config.update(call).items():
                    self.get_buffer(buffer).copy_(new)
        return result

    def redraw(self, seed: int) -> None:
        """Draw the random buffers anew, from `seed`. A decode state from before no longer fits."""
        if not self.config.info.random:
            raise OptionError(f"{self.config.info.name} draws nothing at random, so there is nothing to redraw.")
        self.config = _reseeded(self.config, seed)
        for name, drawn in self.config.buffers(self.spec).items():
            self.get_buffer(name).copy_(drawn)
        self.get_buffer("seed").fill_(seed)

    def extra_repr(self) -> str:
        sizes = f"heads={self.spec.heads}, kv_heads={self.spec.kv_heads}, head_dim={self.spec.head_dim}"
        return f"{self.config}, {sizes}"


def _take_seed(mechanism: Mechanism, _: object) -> None:
    """After weights were loaded: the draw is theirs, so the config's seed is too."""
    seed = mechanism.get_buffer("seed")
    if not seed.is_meta:
        mechanism.config = _reseeded(mechanism.config, int(seed))


def _reseeded(config: Config, seed: int) -> Config:
    return replace(config, seed=seed)  # type: ignore[type-var]


class Attention(nn.Module):
    """Multi-head self- or cross-attention with projections, by any mechanism.

    Args:
        dim: width of the tokens.
        heads: H; each has `head_dim` channels (default dim / heads).
        method: a name or a config object.
        kv_heads: K, a divisor of `heads`; fewer share keys and values among groups of query heads.
        source_dim: width of `source` in cross-attention (default dim).
        bias: whether the projections have one.
        dropout: of attention weights, in training, where the mechanism has weights.
        rotary: the base of rotary positions, usually 10000.0; None for none. Self-attention only.
        scale: replaces the mechanism's own factor on q . k.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        method: str | Config = "softmax",
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
                f"Pass head_dim, or a multiple of {heads}."
            )
        head_dim = dim // heads if head_dim is None else head_dim
        self.mechanism = Mechanism(method, heads=heads, head_dim=head_dim, kv_heads=kv_heads, dim=source_dim)
        checks.dropout(dropout)
        checks.scale(scale)
        grouped = self.mechanism.spec.kv_heads != heads
        asked = {"dropout_p": dropout > 0, "scale": scale is not None, "enable_gqa": grouped}
        require(self.mechanism.config, [need for need, is_asked in asked.items() if is_asked])
        if source_dim != dim and "cross" in self.mechanism.config.refuses:
            require(self.mechanism.config, ["cross"])
        checks.rotary(rotary, head_dim)
        if rotary is not None and source_dim != dim:
            raise InputError(f"rotary positions need self-attention, so source_dim must be dim; got {source_dim} and {dim}.")
        checks.flag("bias", bias)
        self.dropout = dropout
        self.rotary = None if rotary is None else float(rotary)
        self.scale = scale
        spec = self.mechanism.spec
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=bias)
        shared = self.mechanism.config.shares_query_and_key
        self.k_proj = None if shared else nn.Linear(source_dim, spec.kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(source_dim, spec.kv_heads * head_dim, bias=bias)
        self.out_proj = nn.Linear(heads * head_dim, dim, bias=bias)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        is_causal: bool = False,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
        global_mask: Tensor | None = None,
    ) -> Any:
        """Attend from x (B, N, dim) to itself, or to `source` (B, M, source_dim).

        The other arguments, and the result, are those of `attention`; `key_padding_mask` is about the source.
        """
        if source is not None and (not is_causal or self.k_proj is None):
            require(self.mechanism.config, ["cross"])
        source = self._check_tokens(x, source)
        if key_padding_mask is not None:
            checks.padding(key_padding_mask, (source.shape[0], source.shape[1]), source.device)
            real = source.masked_fill(~key_padding_mask.unsqueeze(-1), 0)  # a NaN in a pad would reach the weights' gradients
            x, source = (real if x is source else x), real
        spec = self.mechanism.spec
        q = self.q_proj(x).unflatten(-1, (spec.heads, -1)).transpose(1, 2)  # (B, H, N, D)
        k = q if self.k_proj is None else self.k_proj(source).unflatten(-1, (spec.kv_heads, -1)).transpose(1, 2)  # (B, K, M, D)
        v = self.v_proj(source).unflatten(-1, (spec.kv_heads, -1)).transpose(1, 2)
        after = None
        if self.rotary is not None:
            state, start = self._take_position(state, x)
            position, after = positions(start, x.shape[1], key_padding_mask)
            rotated = rotate(q, position, self.rotary)
            q, k = rotated, rotated if k is q else rotate(k, position, self.rotary)
        out = self.mechanism(
            q,
            k,
            v,
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            state=state,
            return_state=return_state,
            global_mask=global_mask,
            hidden=source if self.mechanism.config.reads_tokens else None,
        )
        out, new = out if return_state else (out, None)
        out = self.out_proj(out.transpose(1, 2).flatten(-2))  # (B, N, dim)
        if after is not None and new is not None:
            new = replace(new, method=self._method, parts={**new.parts, "position": after})
        return (out, new) if return_state else out

    @property
    def _method(self) -> str:
        return f"{_described(self.mechanism.config, self.scale)} with rotary={self.rotary}"

    def _take_position(self, state: State | None, x: Tensor) -> tuple[State | None, Tensor]:
        """The mechanism's own part of the state, and the position that each row has reached."""
        if state is None:
            return None, torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        checks.continues(state, self._method, x)
        parts = dict(state.parts)
        start = parts.pop("position")
        assert isinstance(start, Tensor)
        return replace(state, method=_described(self.mechanism.config, self.scale), parts=parts), start

    def extra_repr(self) -> str:
        return f"rotary={self.rotary}, dropout={self.dropout}, scale={self.scale}"

    def _check_tokens(self, x: Tensor, source: Tensor | None) -> Tensor:
        checks.tokens("x", x, self.q_proj.in_features, self.q_proj.weight)
        if source is None:
            checks.tokens("x, without a source,", x, self.v_proj.in_features)
            return x
        checks.tokens("source", source, self.v_proj.in_features, self.q_proj.weight)
        if self.rotary is not None:
            raise InputError(
                "rotary positions relate tokens of one sequence, so they need self-attention; got a source. "
                "Build with rotary=None."
            )
        return source


def _run(config: Config, call: Call, *needs: str) -> Any:
    checks.call(call)
    require(config, (*call.needs, *needs))
    checks.sharing(config, call.query, call.key)
    method = _described(config, call.scale)
    if call.state is not None:
        checks.state(call.state, method, call.key, call.value)
    with _without_autocast(call.query.device):
        out, parts = config.run(call)
    if not call.return_state:
        return out
    assert parts is not None
    return out, State(
        method=method,
        kv_heads=call.key.shape[1],
        head_dim=call.key.shape[3],
        value_dim=call.value.shape[3],
        dtype=call.key.dtype,
        length=call.seen + call.key.shape[2],
        parts=parts,
    )


def _drawn(
    config: Config,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    keep: bool,
) -> dict[str, Tensor]:
    """The buffers of a mechanism that is called as a function: drawn once, the same in every call.

    `keep` is False among fake tensors, which a later real call must not meet.
    """
    draw = _draw if keep else _draw.__wrapped__
    return draw(config, Spec(heads, kv_heads, head_dim, value_dim), device, dtype)


def _described(config: Config, scale: float | None) -> str:
    """What a state belongs to: another mechanism, draw or scale may not continue it."""
    return repr(config) if scale is None else f"{config!r} with scale={scale}"


# What torch.compiler.assume_constant_result sets, without its import of the compiler: a traced call takes the result as it is.
_drawn._dynamo_marked_constant = True  # type: ignore[attr-defined]
_described._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _draw(config: Config, spec: Spec, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: _as(drawn, device, dtype) for name, drawn in config.buffers(spec).items()}


def _as(drawn: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return drawn.to(device, dtype if drawn.is_floating_point() else drawn.dtype)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Engines choose their own precision: autocast would keep their sums in half precision."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
