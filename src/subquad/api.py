"""`attention`, and `Mechanism`, its module: the one way in. All input is checked here, by the rules in `checks`.

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
from subquad.recomputation import Met, is_recomputing
from subquad.registry import require, resolve
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
        self._lender: Mechanism | None = None
        self._met = Met()
        for name, parameter in self.config.parameters(self.spec).items():
            self.register_parameter(name, nn.Parameter(parameter))
        default = torch.empty(0)  # its device and dtype are the current defaults
        for name, buffer in self._draw_buffers().items():
            self.register_buffer(name, _as(buffer, default.device, default.dtype))
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
            weights=self._weights(),
            hidden=hidden,
            global_mask=global_mask,
        )
        if not self.training or not self.config.info.updates or "decode" in call.needs:
            return _run(self.config, call)
        if is_recomputing():
            return _run(self.config, replace(call, weights={**call.weights, **self._met.recall(query)}))
        result = _run(self.config, call)
        with torch.no_grad():
            new = self.config.update(call)
            self._met.remember(query, {name: self.get_buffer(name) for name in new})
            for name, value in new.items():
                self.get_buffer(name).copy_(value)
        return result

    def borrow_parameters(self, lender: Mechanism) -> None:
        """Use the parameters of `lender`, a mechanism with the same options; they are saved and trained with it, once."""
        if lender.config != self.config or lender.spec != self.spec:
            raise InputError(f"parameters are lent between equals; got {lender} for {self}.")
        for name in list(self._parameters):
            delattr(self, name)
        object.__setattr__(self, "_lender", lender)  # not as a child, whose parameters would be listed here again

    def _weights(self) -> dict[str, Tensor]:
        return {**dict((self._lender or self).named_parameters()), **dict(self.named_buffers())}

    def redraw(self, seed: int) -> None:
        """Draw the random buffers anew, from `seed`. A decode state from before no longer fits."""
        if not self.config.info.random:
            raise OptionError(f"{self.config.info.name} draws nothing at random, so there is nothing to redraw.")
        self.config = _reseeded(self.config, seed)
        for name, drawn in self._draw_buffers().items():
            self.get_buffer(name).copy_(drawn)

    def initial_weights(self) -> dict[str, Tensor]:
        """Parameters and buffers as a new module has them; random parameters are drawn anew."""
        parameters = {} if self._lender else self.config.parameters(self.spec)
        return parameters | self._draw_buffers()

    def take_seed(self) -> None:
        """After weights were loaded: the draw is theirs, so the config's seed is too."""
        if self.config.info.random and not self.get_buffer("seed").is_meta:
            self.config = _reseeded(self.config, int(self.get_buffer("seed")))

    def _draw_buffers(self) -> dict[str, Tensor]:
        """What is drawn from the seed, and the seed."""
        if not self.config.info.random:
            return {}
        return {**self.config.buffers(self.spec), "seed": torch.tensor(self.config.seed)}  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        sizes = f"heads={self.spec.heads}, kv_heads={self.spec.kv_heads}, head_dim={self.spec.head_dim}"
        return f"{self.config}, {sizes}"


def _take_seed(mechanism: Mechanism, _: object) -> None:
    mechanism.take_seed()


def _reseeded(config: Config, seed: int) -> Config:
    return replace(config, seed=seed)  # type: ignore[type-var]


def _run(config: Config, call: Call, *needs: str) -> Any:
    checks.call(call)
    require(config, (*call.needs, *needs))
    checks.sharing(config, call.query, call.key)
    method = described(config, call.scale)
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


def described(config: Config, scale: float | None) -> str:
    """What a state belongs to: another mechanism, draw or scale may not continue it."""
    return repr(config) if scale is None else f"{config!r} with scale={scale}"


# What torch.compiler.assume_constant_result sets, without its import of the compiler: a traced call takes the result as it is.
_drawn._dynamo_marked_constant = True  # type: ignore[attr-defined]
described._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
