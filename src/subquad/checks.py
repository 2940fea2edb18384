"""Checks of inputs. Each error states the rule, what it got, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from subquad.engines.call import Call
from subquad.errors import InputError, StateError, closest, shown, shown_text
from subquad.families.base import LARGEST, SMALLEST, Mechanism, is_finite
from subquad.state import State, is_checked, require_plausible, require_usable

_OPTIONS = tuple(f.name for f in fields(Call) if f.name not in ("query", "key", "value", "weights", "hidden"))
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensors(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> None:
    """Rank, precision, device and sizes of query, key and value."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a tensor; got {type(x).__name__}.")
        if x.dim() != 4:
            raise InputError(
                f"{name} must have 4 dimensions (batch, heads, length, channels); got shape {tuple(x.shape)}. "
                "Use unsqueeze for a missing batch or head, unflatten and transpose(1, 2) for heads inside the channels."
            )
        dense(name, x)
        if x.dtype not in _DTYPES:
            raise InputError(
                f"{name} must be float16, bfloat16, float32 or float64; got {x.dtype}. Convert it, for example with .float()."
            )
    if not query.dtype == key.dtype == value.dtype:
        raise InputError(
            f"query, key and value must have the same dtype; got {_each(named, 'dtype')}. Convert with .to(query.dtype)."
        )
    if not query.device == key.device == value.device:
        raise InputError(
            f"query, key and value must be on the same device; got {_each(named, 'device')}. Move with .to(query.device)."
        )
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise InputError(
            f"query, key and value must have the same batch size; got {_each(named, 'shape')}. "
            "Expand or repeat the smaller ones."
        )
    if key.shape[1] != value.shape[1]:
        raise InputError(f"key and value must have the same number of heads; got {_each(named, 'shape')}.")
    if key.shape[2] != value.shape[2]:
        raise InputError(f"key and value must have the same length; got {_each(named, 'shape')}.")
    if query.shape[3] != key.shape[3]:
        raise InputError(f"query and key must have the same number of channels; got {_each(named, 'shape')}.")
    for name, x in named.items():
        if not x.shape[1] or not x.shape[3]:
            raise InputError(f"{name} must have at least one head and one channel; got shape {tuple(x.shape)}.")
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not enable_gqa:
        raise InputError(
            f"query and key must have the same number of heads unless enable_gqa=True; got {heads} and {kv_heads}. "
            f"Set enable_gqa=True to share each key-value head among several query heads."
        )
    divides(heads, kv_heads)


def dense(name: str, x: Tensor) -> None:
    if x.layout != torch.strided or x.is_nested:
        got = "nested one" if x.is_nested else f"{str(x.layout).removeprefix('torch.')} one"
        raise InputError(f"{name} must be a dense tensor; got a {got}. Use to_dense or to_padded_tensor.")


def _each(named: dict[str, Tensor], attribute: str) -> str:
    """Like `query (2, 3, 5, 7), key (2, 3, 4, 7)`."""
    values = {name: getattr(x, attribute) for name, x in named.items()}
    return ", ".join(f"{name} {tuple(v) if isinstance(v, torch.Size) else v}" for name, v in values.items())


def divides(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise InputError(
            f"the number of key-value heads must divide the number of query heads; got {kv_heads} and {heads}. "
            f"Choose a divisor of {heads}."
        )


def shared_query_and_key(mechanism: Mechanism, query: Tensor, key: Tensor) -> None:
    if mechanism.shares_query_and_key and query is not key:
        name = mechanism.info.name
        raise InputError(
            f"{name} with these options needs one tensor as both query and key; got two. Pass the same tensor twice, as in "
            f"subquad.attention(qk, qk, v, {name!r}), or set shared_qk=False."
        )


def call(call: Call) -> None:
    """Everything else in a call, except whether its state can be continued."""
    flag("is_causal", call.is_causal)
    flag("return_state", call.return_state)
    if call.state is not None:
        plausible_state(call.state)
    queries, keys = call.query.shape[2], call.key.shape[2]
    if call.is_causal and queries != keys:
        raise InputError(
            f"is_causal needs as many keys as queries, one for each position; got {queries} queries and {keys} keys. "
            "Pass the earlier keys as state, or an explicit attn_mask."
        )
    if not call.is_causal and (call.state is not None or call.return_state):
        raise InputError("a decode state needs causal attention; got is_causal=False. Pass is_causal=True.")
    padding(call.key_padding_mask, (call.key.shape[0], keys), call.key.device)
    globals_(call.global_mask, (call.key.shape[0], keys), call.key.device)
    attn_mask(call.attn_mask, call.query, call.seen + keys)
    scale(call.scale)
    dropout(call.dropout_p, "dropout_p")


def options(options: dict[str, object]) -> None:
    """The names of the keyword arguments of a module."""
    for name in options:
        if name not in _OPTIONS:
            raise InputError(f"there is no argument {name!r}{closest(name, _OPTIONS)} Arguments: {', '.join(_OPTIONS)}.")


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False; got {shown(value)}.")


def padding(mask: Tensor | None, expected: tuple[int, int], device: torch.device) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"key_padding_mask must be bool, True for real tokens; got {got}. For ones and zeros pass mask.bool(); for "
            "the convention of torch.nn.MultiheadAttention, where True marks pads, pass ~mask."
        )
    dense("key_padding_mask", mask)
    if tuple(mask.shape) != expected:
        raise InputError(f"key_padding_mask must be (batch, keys) = {expected}; got {tuple(mask.shape)}.")
    if mask.device != device:
        raise InputError(f"key_padding_mask must be on the device of the keys, {device}; got {mask.device}.")


def globals_(mask: Tensor | None, expected: tuple[int, int], device: torch.device) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != expected:
        got = f"{tuple(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"global_mask must be bool, True for global tokens, (batch, keys) = {expected}; got {got}.")
    dense("global_mask", mask)
    if mask.device != device:
        raise InputError(f"global_mask must be on the device of the keys, {device}; got {mask.device}.")


def attn_mask(mask: Tensor | None, query: Tensor, keys: int) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, query.dtype):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"attn_mask must be bool (True = may attend) or, to be added to the scores, {query.dtype}; got {got}.")
    dense("attn_mask", mask)
    full = (query.shape[0], query.shape[1], query.shape[2], keys)
    sizes = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.dim() > 4 or any(size not in (1, whole) for size, whole in sizes):
        raise InputError(f"attn_mask must broadcast to (batch, heads, queries, keys) = {full}; got {tuple(mask.shape)}.")
    if mask.device != query.device:
        raise InputError(f"attn_mask must be on the device of query, {query.device}; got {mask.device}.")


def scale(value: float | None) -> None:
    if value is None:
        return
    if not is_finite(value):
        raise InputError(f"scale must be a finite number, or None for the mechanism's own; got {shown(value)}.")
    if value and not SMALLEST <= abs(value) <= LARGEST:
        raise InputError(
            f"scale must be 0, or from {SMALLEST:g} to {LARGEST:g} in magnitude, which float32 can hold; got {shown(value)}."
        )


def dropout(p: float, name: str = "dropout") -> None:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise InputError(f"{name} must be a probability from 0 to below 1; got {shown(p)}.")


def state(state: State, method: str, key: Tensor, value: Tensor) -> None:
    """Whether this method can continue `state` with these keys and values."""
    state_owner(state, method, key)
    held = (state.kv_heads, state.head_dim, state.value_dim, state.dtype)
    got = (key.shape[1], key.shape[3], value.shape[3], key.dtype)
    if held != got:
        names = ("kv_heads", "head_dim", "value_dim", "dtype")
        differ = [f"{name} {h} in the state, {g} in the call" for name, h, g in zip(names, held, got, strict=True) if h != g]
        raise StateError(
            f"a state must be continued with the same sizes and precision; got {'; '.join(differ)}. "
            "Pass matching tensors, or start a new state with state=None."
        )


def plausible_state(state: State) -> None:
    """Whether `state` is one at all."""
    if not isinstance(state, State):
        raise StateError(f"state must be a State that an earlier call returned, or None; got {type(state).__name__}.")
    require_usable(state)
    if not is_checked(state):
        require_plausible(state)


def state_owner(state: State, method: str, x: Tensor) -> None:
    """Whether `state` was made by this method, for the batch size and device of x."""
    if state.method != method:
        raise StateError(
            f"a state must be continued by the method that made it, {shown_text(state.method)}; got {method}. "
            "Start a new state with state=None."
        )
    if state.batch != x.shape[0]:
        raise StateError(
            f"a state must be continued with its batch size, {state.batch}; got {x.shape[0]}. "
            "Select rows with state.reorder(index)."
        )
    if state.device != x.device:
        raise StateError(
            f"a state must be continued on its device, {state.device}; got {x.device}. Move it with state.to(device)."
        )


def tokens(name: str, x: Tensor, width: int, weight: Tensor | None = None) -> None:
    """(B, length, width); with `weight`, also its device and, unless under autocast, its precision."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != width:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{name} must be (batch, length, {width}); got {got}.")
    dense(name, x)
    if not x.is_floating_point():
        raise InputError(f"{name} must be floating point; got {x.dtype}. Embed integer ids first.")
    if weight is None or not weight.is_floating_point():
        return
    if x.device != weight.device:
        raise InputError(f"{name} must be on the device of the layer, {weight.device}; got {x.device}. Move one of them.")
    cast = torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)
    if x.dtype != weight.dtype and not cast:
        raise InputError(f"{name} must have the precision of the layer, {weight.dtype}; got {x.dtype}. Convert one of them.")


def weights(weights: Mapping[str, Tensor], query: Tensor) -> None:
    """The weights of a module must be on the device of its input."""
    for name, x in weights.items():
        if x.device != query.device:
            raise InputError(
                f"the input must be on the device of the module, {x.device}, where its {name} is; got {query.device}."
            )


def hidden(hidden: Tensor | None, key: Tensor, dim: int | None, method: str) -> None:
    """`dim` is None for a mechanism that does not use the hidden states."""
    if dim is None and hidden is not None:
        raise InputError(f"{method} does not use the hidden states, so hidden must be None; got a tensor. Leave it out.")
    if dim is None:
        return
    if hidden is None:
        raise InputError(
            f"{method} needs the hidden states that the keys were projected from; got hidden=None. "
            f"Pass hidden, (batch, keys, {dim})."
        )
    tokens("hidden", hidden, dim)
    if hidden.shape[:2] != (key.shape[0], key.shape[2]) or hidden.device != key.device:
        raise InputError(
            f"hidden must be (batch, keys, dim) = {(key.shape[0], key.shape[2], dim)} on {key.device}; "
            f"got {tuple(hidden.shape)} on {hidden.device}."
        )


def rotary(base: float | None, head_dim: int) -> None:
    if base is None:
        return
    if not is_finite(base) or base <= 1:
        raise InputError(
            f"rotary must be the base of the angles, a number above 1 such as 10000.0, or None; got {shown(base)}."
        )
    if head_dim % 2:
        raise InputError(f"rotary positions rotate pairs of channels, so head_dim must be even; got {head_dim}.")


def seed(value: int) -> None:
    """A seed for random numbers; the bound leaves room to combine it with a step."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise InputError(f"seed must be an integer from 0 to 2^31 - 1; got {shown(value)}.")


def sizes(**named: int) -> None:
    for name, size in named.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"{name} must be an integer of at least 1; got {shown(size)}.")
        if size >= 2**31:
            raise InputError(f"{name} must be an integer below 2**31; got {shown(size)}.")
