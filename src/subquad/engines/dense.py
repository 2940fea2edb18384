"""The dense engine: every query attends to every key, through PyTorch's fused kernel.

PyTorch adds a mask to the scores, which makes NaN of a masked score that has overflowed. Such a call is computed again in
float64, where no product of float32 numbers overflows; under torch.compile it stays NaN.

B batch, H query heads, K key-value heads, G = H / K query heads per key-value head, N queries, M keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines import token_buffer
from subquad.engines.call import Call
from subquad.engines.state_spec import StateSpec, TensorSpec
from subquad.engines.step import StateView, Step
from subquad.growing_tensor import GrowingTensor
from subquad.masks import causal, zero_pads
from subquad.ops.precision import compute_dtype, has_nan, needs_gradient, upcast
from subquad.state import StateTensors

# Measured in bfloat16: with 64 keys, float32 takes 0.35 to 0.6 of the time; with 512 the same time; with 1,024 more.
_FEW_KEYS = 256


def attend(call: Call) -> tuple[Tensor, StateTensors | None]:
    """`softmax(scale q k^T + mask) v` over the past keys and these; the state is all keys and values so far."""
    query, mask, padding, past = call.query, call.attn_mask, call.key_padding_mask, call.past
    key, value = zero_pads(call.key, padding), zero_pads(call.value, padding)
    state: StateTensors = {}
    if past is not None or call.return_state:
        past, new = past or {}, key
        recorded = needs_gradient(query, key, value)
        key = _grow(state, past, "key", key, recorded)
        value = _grow(state, past, "value", value, recorded)
        seen = key.shape[-2] - new.shape[-2]
        padding = _grow_mask(state, past, seen, new, padding)

    if padding is not None:
        mask = _both(mask, padding[:, None, None, :])  # (B, 1, 1, M)
    queries, keys = query.shape[-2], key.shape[-2]
    # SDPA's is_causal aligns the first query with the first key, which is wrong after a past. A single query sees all keys.
    is_aligned = call.is_causal and mask is None and not past
    if call.is_causal and not is_aligned and queries > 1:
        mask = _both(mask, causal(queries, keys, query.device))
    out = _fused(query, key, value, mask, scale=call.scale, dropout_p=call.dropout_p, is_causal=is_aligned)
    return out, state if call.return_state else None


def state_spec(call: Call) -> StateSpec:
    """The tensors of a state after `call.seen` tokens; it has a mask if any call had one."""
    kv_heads, seen, dtype = call.key.shape[1], call.seen, call.key.dtype
    return {
        "key": TensorSpec((kv_heads, seen, call.key.shape[3]), dtype),
        "value": TensorSpec((kv_heads, seen, call.value.shape[3]), dtype),
        "mask": TensorSpec((1, seen, 1), torch.bool, is_optional=True),
    }


def prepare_step(call: Call) -> Step | None:
    """A step for calls like this one, unless earlier tokens were pads or the scale needs care."""
    has_mask = call.state is None or "mask" in call.state.tensors
    return None if has_mask or call.softmax_scale <= 0 else _DenseStep(call)


class _DenseStep(Step):
    def __init__(self, call: Call) -> None:
        self._scale = call.scale

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, past: StateView, seen: int, *, may_overwrite: bool
    ) -> tuple[Tensor, StateTensors, bool]:
        grown = token_buffer.append_row(past, ("key", "value"))
        for name, new in (("key", key), ("value", value)):
            grown[name].buffer.select(2, seen).copy_(new.squeeze(2))
        return _fused(query, grown["key"].rows, grown["value"].rows, None, scale=self._scale), {**grown}, True


def attend_masked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float | None) -> Tensor:
    """`softmax(scale q k^T) v` over the `visible` pairs, a mask that broadcasts to (B, H, N, M); None for all pairs."""
    return _fused(query, key, value, visible, scale=scale)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """PyTorch's fused kernel, for any scale, any number of key-value heads, and fast in half precision too."""
    if mask is not None:
        mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
    if scale is not None and scale <= 0:
        query, scale = query * scale, 1.0  # the fused kernel multiplies the mask's -inf by the scale: NaN at 0, +inf below
    queries, heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
    grouped = True if heads != kv_heads else False  # noqa: SIM210 - a real bool, where the sizes are symbols
    fold = grouped and not is_causal and (mask is None or mask.shape[-3:-1] == (1, 1))
    if fold:  # treat the query heads of a group as more queries of one head, so that no key is repeated
        query = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # (B, K, G N, D)
    dtype = query.dtype
    if _is_slow_in_half(query, key, value):
        query, key, value = upcast(query), upcast(key), upcast(value)
        mask = mask if mask is None or mask.dtype == torch.bool else upcast(mask)
    options: Any = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": grouped and not fold}
    out = F.scaled_dot_product_attention(query, key, value, mask, **options)
    # Only its fused kernel for `is_causal` adds no mask; it needs values as wide as keys, and no dropout.
    adds_mask = mask is not None or (is_causal and (key.shape[-1] != value.shape[-1] or dropout_p > 0))
    if adds_mask and query.dtype != torch.float64 and has_nan(out):
        mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
        out = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask, **options)
    if fold:
        out = out.unflatten(2, (heads // kv_heads, queries)).flatten(1, 2)
    return out.to(dtype)


def _is_slow_in_half(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether training takes longer than in float32: on a CPU, with few keys, it does."""
    is_half = query.device.type == "cpu" and query.dtype != compute_dtype(query)
    return is_half and key.shape[-2] <= _FEW_KEYS and needs_gradient(query, key, value)


def _both(mask: Tensor | None, allowed: Tensor) -> Tensor:
    if mask is None:
        return allowed
    if mask.dtype == torch.bool:
        return mask & allowed
    return torch.where(allowed, mask, float("-inf"))


def _grow(state: StateTensors, past: StateTensors, name: str, new: Tensor, recorded: bool = False) -> Tensor:
    """All rows so far: those of the past, then `new`; stored in the state as `name`."""
    old = past.get(name, new[..., :0, :])
    grown = (GrowingTensor(old) if isinstance(old, Tensor) else old).append(new, recorded=recorded)
    state[name] = grown
    return grown.rows


def _grow_mask(state: StateTensors, past: StateTensors, seen: int, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """The padding mask of all keys so far, or None if no call has had one; then the state stores none either."""
    if mask is None and "mask" not in past:
        return None
    batch, _, new, _ = key.shape
    column = key.new_ones(batch, 1, new, 1, dtype=torch.bool) if mask is None else mask[:, None, :, None]
    if "mask" not in past:
        past = {"mask": column.new_ones(batch, 1, seen, 1)}
    return _grow(state, past, "mask", column)[:, 0, :, 0]
