"""The hybrid engine: exact softmax terms for near keys and kernelized ones for far keys, under one denominator.

    o_i = sum_j w_ij v_j / sum_j w_ij,    w_ij = e^(s q_i . k_j)           where key j is near, at most `window` steps away,
                                          w_ij = g phi(q_i) . phi(k_j)     where it is far

over all j, or over j <= i when causal; phi >= 0, g > 0. Both kinds of weights are taken relative to e^(c_i),

    c_i = max(largest near score, log of the sum of the far weights),

which cancels. Nothing overflows, and the larger kind of weights keeps its precision. Far weights whose sum underflows count as
0. `subquad.ops.hybrid` does the computation; this module projects queries and keys for phi, and keeps the state.

A decode state keeps the last `window` keys and values, and the sums over all keys before them. The kept keys stand in front of
those of the tokens that continue it. Positions count real tokens only; the queries of pads give 0.

B batch, H query heads, K key-value heads, n tokens, L keys with those of the state, D channels, Dv value channels, m features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.state_spec import Rows, StateSpec, TensorSpec
from subquad.masks import put_back, real_first, take_tokens, zero_pads
from subquad.ops import dispatch, kernelized
from subquad.ops.feature_map import FeatureMap
from subquad.ops.hybrid import HybridRule, Inputs, operator, pytorch
from subquad.ops.kernelized import Sums
from subquad.ops.kernelized.operator import attend as attend_kernelized
from subquad.ops.precision import compute_dtype, needs_gradient, upcast
from subquad.state import StateTensors

_ROOM = 256  # the room of a state grows by as many rows, up to the window


@dataclass(frozen=True, kw_only=True)
class HybridCall:
    """What the mechanism states.

    Args:
        rule: how near and far keys are weighed.
        project: maps queries (B, H, n, D) or keys (B, K, n, D), by the side, to what phi is applied to.
        channels: of a projected query or key.
        log_mix: (H,), log g.
    """

    rule: HybridRule
    project: Callable[[Tensor, Literal["query", "key"]], Tensor]
    channels: int
    log_mix: Tensor

    @property
    def feature_map(self) -> FeatureMap:
        return self.rule.feature_map(self.channels)


def attend(call: Call, hybrid: HybridCall) -> tuple[Tensor, StateTensors | None]:
    """The output (B, H, n, Dv) and, with `return_state`, the state."""
    mask = call.key_padding_mask
    query, key, value = (zero_pads(x, mask) for x in (call.query, call.key, call.value))
    order = real = None
    if mask is not None:
        order, real = real_first(mask)
        query, key, value = (take_tokens(x, order) for x in (query, key, value))
    projected = (hybrid.project(upcast(query), "query"), hybrid.project(upcast(key), "key"))
    inputs = Inputs(query, key, value, *projected, real, hybrid.log_mix)
    records, state = needs_gradient(*inputs), None
    if dispatch.choose("hybrid", inputs, *_reasons(call, records)):
        out = operator.attend(inputs, hybrid.rule, needs_gradient=records)
        state = _state_of_prompt(inputs, hybrid) if call.return_state else None
    elif call.past is None and not call.return_state:
        out = pytorch.attend(inputs, hybrid.rule).out
    else:
        out, state = _continue(call, inputs, hybrid)
    if order is not None and real is not None:
        out = put_back(out.masked_fill(~real[:, None, :, None], 0), order)
    return out.to(query.dtype), state


def state_spec(call: Call, hybrid: HybridCall) -> StateSpec:
    """See `_empty_state`."""
    window = hybrid.rule.window
    kv_heads, kept = call.key.shape[1], Rows(window, least=min(window, call.seen))
    return {
        "S": TensorSpec((kv_heads, hybrid.feature_map.features, call.value.shape[3] + 1), compute_dtype(call.value)),
        "key": TensorSpec((kv_heads, kept, call.key.shape[3]), call.key.dtype),
        "value": TensorSpec((kv_heads, kept, call.value.shape[3]), call.value.dtype),
        "count": TensorSpec((), torch.int64, range=(0, min(window, call.seen))),
    }


def _reasons(call: Call, records: bool) -> list[str]:
    """Why the operator cannot be used."""
    if call.past is not None:
        return ["a decode state is continued in PyTorch"]
    if call.return_state and records:
        return ["the compiled kernel has no gradients of decode states"]
    return []


def capacity_of(seen: int, window: int) -> int:
    """How many keys a state of `seen` tokens has room for."""
    return min(window, _ROOM * (seen // _ROOM + 1))


def _state_of_prompt(inputs: Inputs, hybrid: HybridCall) -> StateTensors:
    """The state after a whole sequence; nothing is recorded. Real tokens come first."""
    (batch, _, length), window = inputs.key.shape[:3], hybrid.rule.window
    capacity, device = capacity_of(length, window), inputs.key.device
    count = torch.full((batch,), length, device=device) if inputs.mask is None else inputs.mask.sum(1)
    leaving = torch.arange(length, device=device) < (count - capacity)[:, None]
    no_query = inputs.projected_query[:, :, :0]
    _, sums = attend_kernelized(
        kernelized.Inputs(no_query, inputs.projected_key, inputs.value, leaving, False),
        kernelized.KernelizedRule(feature_map=hybrid.feature_map),
        {},
        return_sums=True,
        needs_gradient=False,
    )
    index = (count - capacity)[:, None] + torch.arange(capacity, device=device)
    kept = (_kept(x, None if inputs.mask is None else index, capacity) for x in inputs[1:3])
    key, value = kept
    return {"S": sums["S"], "key": key, "value": value, "count": count.clamp(max=capacity)}


def _kept(x: Tensor, index: Tensor | None, capacity: int) -> Tensor:
    """The last `capacity` tokens of x (B, K, n, ...), or those at `index` (B, capacity); zeros before the first one."""
    length = x.shape[2]
    if index is None or not length:
        kept = x[:, :, max(length - capacity, 0) :]
        return F.pad(kept, (0, 0, capacity - kept.shape[2], 0)) if kept.shape[2] < capacity else kept.clone()
    return take_tokens(x, index.clamp(min=0)).masked_fill((index < 0)[:, None, :, None], 0)


def _continue(call: Call, inputs: Inputs, hybrid: HybridCall) -> tuple[Tensor, StateTensors | None]:
    """The output of the tokens after a state, or after nothing, and the new state; in PyTorch."""
    length, rule = inputs.key.shape[2], hybrid.rule
    capacity = capacity_of(call.seen + length, rule.window)
    if call.past is None:
        state = _empty_state(inputs.key, inputs.value, hybrid, capacity)
    else:
        state = _with_room(dict(call.past), capacity)  # type: ignore[arg-type]
    real = inputs.mask
    if real is None:
        real = torch.ones(inputs.key.shape[0], length, dtype=torch.bool, device=inputs.key.device)
    keys = _join(state, inputs, real, hybrid)
    queries = pytorch.Queries(inputs.query, inputs.projected_query, inputs.log_mix)
    out = pytorch.attend_to(queries, keys, state["S"], rule).out
    return out, _next_state(state, keys, real, inputs.mask is not None) if call.return_state else None


def _empty_state(key: Tensor, value: Tensor, hybrid: HybridCall, capacity: int) -> Sums:
    """The state before the first token, with room for `capacity` keys.

    S (B, K, m, Dv + 1); key (B, K, w, D) and value (B, K, w, Dv), the newest last; count (B,), how many of them are filled.
    """
    heads, width = key.shape[:2], value.shape[3]
    return {
        "S": upcast(value).new_zeros(*heads, hybrid.feature_map.features, width + 1),
        "key": key.new_zeros(*heads, capacity, key.shape[3]),
        "value": value.new_zeros(*heads, capacity, width),
        "count": torch.zeros(key.shape[0], dtype=torch.int64, device=key.device),
    }


def _with_room(state: Sums, capacity: int) -> Sums:
    """The state with room for at least `capacity` keys."""
    more = capacity - state["key"].shape[2]
    if more <= 0:
        return state
    return {**state, **{name: F.pad(state[name], (0, 0, more, 0)) for name in ("key", "value")}}


def _join(state: Sums, inputs: Inputs, real: Tensor, hybrid: HybridCall) -> pytorch.Keys:
    """The kept keys of the state, then the new ones."""
    capacity = state["key"].shape[2]
    kept = torch.arange(capacity, device=real.device) >= capacity - state["count"][:, None]
    old = hybrid.project(upcast(state["key"]), "key")
    pairs = ((state["key"], inputs.key), (state["value"], inputs.value), (old, inputs.projected_key))
    key, value, projected = (torch.cat(pair, dim=2) for pair in pairs)
    return pytorch.Keys.of(key, value, projected, torch.cat([kept, real], dim=1), hybrid.rule)


def _next_state(state: Sums, keys: pytorch.Keys, real: Tensor, has_pads: bool) -> StateTensors:
    """The state for later tokens: the last keys, and the sums with the keys that have left the window added."""
    capacity, length = state["key"].shape[2], real.shape[1]
    count = real.sum(1)
    leaving = torch.arange(length, device=count.device) < count[:, None]
    phi = keys.phi[:, :, :length] * leaving[:, None, :, None]
    index = count[:, None] + torch.arange(capacity, device=count.device)
    kept = (x[:, :, length:].clone() if not has_pads else take_tokens(x, index) for x in (keys.key, keys.value[..., :-1]))
    key, value = (x.to(state[name].dtype) for name, x in zip(("key", "value"), kept, strict=True))
    return {
        "S": state["S"] + phi.mT @ keys.value[:, :, :length],
        "key": key,
        "value": value,
        "count": (state["count"] + count).clamp(max=capacity),
    }
