"""`attention`, and `MechanismModule`, which holds a mechanism's weights: the one place where input is checked (see `checks`).

B batch, H query heads, K key-value heads, N queries, M keys, D channels, Dv value channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from subquad import checks
from subquad.engines import state_spec, step
from subquad.engines.call import Call
from subquad.engines.state_spec import StateSpec
from subquad.engines.step import PreparedStep
from subquad.errors import InputError, OptionError, UnsupportedError
from subquad.families.base import Mechanism, Sizes
from subquad.families.recomputation import BufferHistory, is_recomputing
from subquad.ops.precision import all_finite, needs_gradient
from subquad.registry import require, resolve
from subquad.state import State, checked, is_checked, is_donated, take_memory


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    method: str | Mechanism = "softmax",
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
        method: a name from `subquad.methods()`, or a mechanism with options such as `subquad.Performer(features=128)`.
        is_causal: query i attends to keys 0 to i, and to everything that `state` holds. Needs N = M.
        key_padding_mask: (B, M) bool, True for real tokens. The content of the others never matters.
        attn_mask: bool (True = may attend), or floating point to be added to the scores; broadcasts to (B, H, N, M), where M
            includes the keys in `state`.
        scale: replaces the mechanism's own factor on q . k.
        enable_gqa: allow fewer key-value heads than query heads.
        dropout_p: probability of dropping an attention weight.
        state: what an earlier causal call returned; this call continues from it and does not change it, unless it is
            `state.donate()`, whose memory the call may overwrite.
        return_state: return `(output, state)`.
        global_mask: (B, M) bool, for mechanisms with global tokens: True for tokens that attend to all, and all to them.

    Returns:
        (B, H, N, Dv), zero for queries that may attend to nothing; or `(output, state)`. The dtype is that of the inputs, under
        autocast too; sums are accumulated in float32 at least.

    Raises:
        SubquadError: the inputs do not fit together, or the mechanism does not support what is asked for.
    """
    mechanism = resolve(method)
    if (prepared := step.find(state)) is not None and state is not None:
        is_plain = is_causal is True and return_state is True and key_padding_mask is None and attn_mask is None
        is_plain = is_plain and global_mask is None and type(dropout_p) is float and dropout_p == 0
        if is_plain and prepared.takes(mechanism, query, key, value, scale, None, enable_gqa=enable_gqa):
            return prepared.run(state, query, key, value)
    checks.flag("enable_gqa", enable_gqa)
    checks.tensors(query, key, value, enable_gqa=enable_gqa)
    weights: dict[str, Tensor] = {}
    if mechanism.info.random:
        heads, kv_heads, *dims = (_constant(n) for n in (query.shape[1], key.shape[1], query.shape[3], value.shape[3]))
        dtype = torch.promote_types(query.dtype, torch.float32)
        weights = _random_buffers(mechanism, heads, kv_heads, dims[0], dims[1], query.device, dtype, type(query) is Tensor)
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
        global_mask=global_mask,
        weights=weights,
    )
    return _run(mechanism, call, "functional")


class MechanismModule(nn.Module):
    """The buffers and parameters of a mechanism, in a module that is called like `attention`. `Mechanism.build` makes one.

    Args:
        method: a name or a mechanism.
        heads, head_dim, kv_heads, value_dim: H, D, K (default H) and Dv (default D).
        dim: the width of the hidden states, for mechanisms that use them.
    """

    def __init__(
        self,
        method: str | Mechanism,
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
        self.method = resolve(method)
        self.sizes = Sizes(heads, kv_heads, head_dim, value_dim, dim)
        self._lender: MechanismModule | None = None
        self._history = BufferHistory()
        for name, parameter in self.method.parameters(self.sizes).items():
            self.register_parameter(name, nn.Parameter(parameter))
        default = torch.empty(0)  # has the current default device and dtype
        for name, buffer in self._draw_buffers().items():
            self.register_buffer(name, _cast(buffer, default.device, default.dtype))
        self.register_load_state_dict_post_hook(_take_seed)  # type: ignore[no-untyped-call]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, hidden: Tensor | None = None, **options: Any) -> Any:
        """As `attention`, with its other arguments as `options`, except `method` and `enable_gqa`.

        `hidden` (B, M, dim): the hidden states that the keys were projected from, for mechanisms that use them.
        """
        if hidden is None and (prepared := step.find(options.get("state"))) is not None and _is_plain_step(options):
            held = {**(self._lender or self)._parameters, **self._buffers}
            if prepared.takes(self.method, query, key, value, options.get("scale"), held):
                return prepared.run(options["state"], query, key, value)
        checks.options(options)
        checks.tensors(query, key, value, enable_gqa=True)
        sizes, name = self.sizes, self.method.info.name
        if (query.shape[1], key.shape[1], query.shape[3]) != (sizes.heads, sizes.kv_heads, sizes.head_dim):
            raise InputError(
                f"this {name} module was built for heads={sizes.heads}, kv_heads={sizes.kv_heads}, head_dim={sizes.head_dim}; "
                f"got query {tuple(query.shape)} and key {tuple(key.shape)}. Build another module for these sizes."
            )
        if self.method.fixes_value_dim and value.shape[3] != sizes.value_dim:
            raise InputError(f"this {name} module was built for value_dim={sizes.value_dim}; got value {tuple(value.shape)}.")
        checks.hidden(hidden, key, sizes.dim if self.method.reads_tokens else None, name)
        weights = self._weights()
        checks.weights(weights, query)
        call = Call(query=query, key=key, value=value, weights=weights, hidden=hidden, **options)
        if not self.training or not self.method.info.updates or "decode" in call.needs:
            return _run(self.method, call)
        if is_recomputing():
            return _run(self.method, replace(call, weights={**call.weights, **self._history.recall(query)}))
        result = _run(self.method, call)
        with torch.no_grad():
            new = self.method.update(call)
            self._history.record(query, {name: self.get_buffer(name) for name in new})
            for name, buffer in new.items():
                self.get_buffer(name).copy_(buffer)
        return result

    def borrow_parameters(self, lender: MechanismModule) -> None:
        """Use the parameters of `lender`, a module of the same mechanism and sizes, which alone saves and trains them."""
        if lender.method != self.method or lender.sizes != self.sizes:
            raise InputError(
                f"parameters can be borrowed from a module of the same mechanism and sizes only; got {lender} for {self}."
            )
        for name in list(self._parameters):
            delattr(self, name)
        object.__setattr__(self, "_lender", lender)  # not as a submodule, which would list its parameters here again

    def _weights(self) -> dict[str, Tensor]:
        return {**dict((self._lender or self).named_parameters()), **dict(self.named_buffers())}

    def redraw(self, seed: int) -> None:
        """Draw the random buffers again, from `seed`. Earlier decode states cannot be continued."""
        if not self.method.info.random:
            raise OptionError(f"{self.method.info.name} draws nothing at random, so there is nothing to redraw.")
        self.method = _with_seed(self.method, seed)
        for name, drawn in self._draw_buffers().items():
            self.get_buffer(name).copy_(drawn)

    def initial_weights(self) -> dict[str, Tensor]:
        """Parameters and buffers as in a new module; random parameters are drawn again."""
        parameters = {} if self._lender else self.method.parameters(self.sizes)
        return parameters | self._draw_buffers()

    def take_seed(self) -> None:
        """After weights were loaded: the random buffers come from their seed, so the mechanism must have it too."""
        if self.method.info.random and not self.get_buffer("seed").is_meta:
            self.method = _with_seed(self.method, int(self.get_buffer("seed")))

    def _draw_buffers(self) -> dict[str, Tensor]:
        """What is drawn from the seed, and the seed."""
        if not self.method.info.random:
            return {}
        return {**self.method.buffers(self.sizes), "seed": torch.tensor(self.method.seed)}  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        sizes = f"heads={self.sizes.heads}, kv_heads={self.sizes.kv_heads}, head_dim={self.sizes.head_dim}"
        return f"{self.method}, {sizes}"


Mechanism.module_class = MechanismModule


def _is_plain_step(options: dict[str, Any]) -> bool:
    """Whether a module was called with `state`, `is_causal` and `return_state`, and otherwise with what changes nothing."""
    if options.get("is_causal") is not True or options.get("return_state") is not True:
        return False
    dropout_p = options.get("dropout_p", 0.0)
    masks = ("key_padding_mask", "attn_mask", "global_mask")
    is_known = len(options) == sum(name in options for name in (*masks, *_STEP_OPTIONS))
    return is_known and type(dropout_p) is float and dropout_p == 0 and all(options.get(name) is None for name in masks)


_STEP_OPTIONS = ("state", "is_causal", "return_state", "scale", "dropout_p")


def _take_seed(module: MechanismModule, _: object) -> None:
    module.take_seed()


def _with_seed(mechanism: Mechanism, seed: int) -> Mechanism:
    return replace(mechanism, seed=seed)  # type: ignore[type-var]


def _run(mechanism: Mechanism, call: Call, *needs: str) -> Any:
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise UnsupportedError(
            "torch.jit.trace cannot record compiled kernels, and it would fix the sequence length; got a traced call. "
            "Use torch.export or torch.compile."
        )
    checks.call(call)
    require(mechanism, (*call.needs, *needs))
    checks.shared_query_and_key(mechanism, call.query, call.key)
    method = described(mechanism, call.scale)
    call = _resolved(call)
    if call.state is not None:
        checks.state(call.state, method, call.key, call.value)
        if not is_checked(call.state):
            _check_tensors(call.state, mechanism.state_spec(call))
        if step.is_step(call) and (body := mechanism.step(call)) is not None:
            prepared = PreparedStep(body, mechanism, call, is_functional="functional" in needs)
            return prepared.run(call.state, call.query, call.key, call.value)
    # A function has no learned weights, and torch.compile sees a constant there.
    spoiled = _spoiled_pads(call, () if "functional" in needs else call.weights.values())
    if spoiled is not None:
        call = replace(call, query=call.query.masked_fill(spoiled, 0))
    with _without_autocast(call.query.device):
        out, tensors = mechanism.run(call)
    if spoiled is not None and "cross" not in mechanism.refuses:  # they may be real queries, of another sequence
        out = out.masked_fill(spoiled, math.nan)
    if call.state is not None and is_donated(call.state):
        take_memory(call.state)
    if not call.return_state:
        return out
    assert tensors is not None
    state = State(
        method=method,
        kv_heads=call.key.shape[1],
        head_dim=call.key.shape[3],
        value_dim=call.value.shape[3],
        dtype=call.key.dtype,
        length=call.seen + call.key.shape[2],
        tensors=tensors,
    )
    if call.state is not None and not call.key.shape[2]:
        state = state.clone()  # engines that had nothing to add return the tensors of the old state
    return out, checked(state)


def _resolved(call: Call) -> Call:
    """The call without lazy views such as `z.conj().imag`: their memory has the opposite signs, and kernels read memory.

    An integer as the scale becomes a float, because PyTorch multiplies tensors by integers of 64 bits only.
    """
    if isinstance(call.scale, int):
        call = replace(call, scale=float(call.scale))
    if torch.compiler.is_compiling():
        return call
    given = (call.query, call.key, call.value, call.attn_mask, call.hidden, *call.weights.values())
    if not any(x is not None and x.is_neg() for x in given):
        return call
    tensors: dict[str, Any] = {name: x.resolve_neg() for name, x in vars(call).items() if isinstance(x, Tensor)}
    return replace(call, **tensors, weights={name: x.resolve_neg() for name, x in call.weights.items()})


def _spoiled_pads(call: Call, learned: Iterable[Tensor]) -> Tensor | None:
    """The queries (B, H, N, 1) at the places of pads that are not finite; None if there are none.

    They are left out of the computation, because 0 times NaN is NaN: even where the gradient of their output is 0, they would
    reach the gradients of all keys that they attend to.
    """
    query, real = call.query, call.key_padding_mask
    if real is None or query.shape[2] != real.shape[1]:
        return None
    if not needs_gradient(query, call.key, call.value, *learned) or all_finite(query):
        return None
    return ~(query.isfinite().all(-1, keepdim=True) | real[:, None, :, None])


def _check_tensors(state: State, expected: StateSpec | None) -> None:
    """Check a state that no call has returned, once; in a traced call, which reads no numbers, every time."""
    if expected is not None:
        state_spec.check(state, expected)
    if not torch.compiler.is_compiling():
        checked(state)


def _random_buffers(
    mechanism: Mechanism,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    keep: bool,
) -> dict[str, Tensor]:
    """The buffers of a mechanism that is called as a function: drawn once, the same in every call.

    `keep` is False for fake tensors, which must not be reused by a later real call. What is kept is drawn outside of whatever
    transforms or traces this call.
    """
    sizes = Sizes(heads, kv_heads, head_dim, value_dim)
    if not keep:
        return _draw(mechanism, sizes, device, dtype)
    with torch._C._DisableFuncTorch(), _disable_current_modes():
        return _draw_once(mechanism, sizes, device, dtype)


def _constant(size: int) -> int:
    """`size`, which a traced call with symbols for sizes takes as a constant from here on."""
    return len((None,) * size) if torch.compiler.is_compiling() else size


def described(mechanism: Mechanism, scale: float | None) -> str:
    """What a state belongs to: another mechanism, seed or scale may not continue it."""
    return mechanism.description if scale is None else f"{mechanism.description} with scale={scale}"


# As torch.compiler.assume_constant_result does, without its import of the compiler: traced calls take the result as a constant.
_random_buffers._dynamo_marked_constant = True  # type: ignore[attr-defined]
described._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _draw(mechanism: Mechanism, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: _cast(drawn, device, dtype) for name, drawn in mechanism.buffers(sizes).items()}


# Buffers that were drawn in inference mode could not be saved for a backward pass later.
_draw_once = lru_cache(maxsize=64)(torch.inference_mode(False)(_draw))


def _cast(drawn: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return drawn.to(device, dtype if drawn.is_floating_point() else drawn.dtype)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Engines choose their own precision; autocast would keep their sums in half precision."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
