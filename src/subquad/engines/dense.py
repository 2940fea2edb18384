"""The dense engine: every query meets every key, through PyTorch's fused kernel.

B batch, H query heads, K key-value heads, G = H / K queries a group, N queries, M keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.masks import causal, zero_pads
from subquad.ops.precision import compute_dtype, needs_gradient, upcast
from subquad.state import GrowingTensor, StateTensors

_FEW = 256  # keys: in bfloat16, float32 took 0.35 to 0.6 of the time for 64 of them, as much for 512, more for 1,024


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    scale: float | None,
    dropout_p: float,
    past: StateTensors | None,
    return_state: bool,
) -> tuple[Tensor, StateTensors | None]:
    """`softmax(scale q k^T + mask) v` over the past keys and these; the state is the keys and values themselves."""
    key, value = zero_pads(key, key_padding_mask), zero_pads(value, key_padding_mask)
    state: StateTensors = {}
    if past is not None or return_state:
        past, new = past or {}, key
        recorded = needs_gradient(query, key, value)
        key = _grow(state, past, "key", key, recorded)
        value = _grow(state, past, "value", value, recorded)
        seen = key.shape[-2] - new.shape[-2]
        key_padding_mask = _grow_mask(state, past, seen, new, key_padding_mask)

    mask = attn_mask if attn_mask is None else attn_mask.reshape(*[1] * (4 - attn_mask.dim()), *attn_mask.shape)
    if key_padding_mask is not None:
        mask = _both(mask, key_padding_mask[:, None, None, :])  # (B, 1, 1, M)
    queries, keys = query.shape[-2], key.shape[-2]
    # SDPA's is_causal aligns the first query with the first key: wrong once there is a past. A single query sees all.
    aligned = is_causal and mask is None and not past
    if is_causal and not aligned and queries > 1:
        mask = _both(mask, causal(queries, keys, query.device))
    if scale is not None and scale <= 0:
        query, scale = query * scale, 1.0  # the fused kernel scales after it masks: 0 or less times -inf
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = True if heads != kv_heads else False  # noqa: SIM210 - a real bool, where the sizes are symbols
    fold = grouped and not aligned and (mask is None or mask.shape[-3:-1] == (1, 1))
    if fold:  # the queries of a group as more queries of one head: no key is repeated
        query = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # (B, K, G N, D)
    dtype = query.dtype
    if _is_slow_in_half(query, key, value):
        query, key, value = upcast(query), upcast(key), upcast(value)
        mask = mask if mask is None or mask.dtype == torch.bool else upcast(mask)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=aligned,
        scale=scale,
        enable_gqa=grouped and not fold,
    )
    if fold:
        out = out.unflatten(2, (heads // kv_heads, queries)).flatten(1, 2)
    return out.to(dtype), state if return_state else None


def _is_slow_in_half(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the fused kernel's gradients take longer than in float32: of few keys on a CPU they do."""
    is_half = query.device.type == "cpu" and query.dtype != compute_dtype(query)
    return is_half and key.shape[-2] <= _FEW and needs_gradient(query, key, value)


def attend_masked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float | None) -> Tensor:
    """`softmax(scale q k^T) v` over the pairs that are `visible`, which broadcasts to (B, H, N, M); None: over all."""
    out, _ = attend(
        query,
        key,
        value,
        is_causal=False,
        key_padding_mask=None,
        attn_mask=visible,
        scale=scale,
        dropout_p=0.0,
        past=None,
        return_state=False,
    )
    return out


def _both(mask: Tensor | None, allowed: Tensor) -> Tensor:
    if mask is None:
        return allowed
    if mask.dtype == torch.bool:
        return mask & allowed
    return torch.where(allowed, mask, float("-inf"))


def _grow(state: StateTensors, past: StateTensors, name: str, new: Tensor, recorded: bool = False) -> Tensor:
    """All rows so far: those of the past and `new`, which join the state under `name`."""
    old = past.get(name, new[..., :0, :])
    grown = (GrowingTensor(old) if isinstance(old, Tensor) else old).append(new, recorded=recorded)
    state[name] = grown
    return grown.rows


def _grow_mask(state: StateTensors, past: StateTensors, seen: int, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """The padding mask of all keys so far; the state holds one only once a call has brought one."""
    if mask is None and "mask" not in past:
        return None
    batch, _, new, _ = key.shape
    column = key.new_ones(batch, 1, new, 1, dtype=torch.bool) if mask is None else mask[:, None, :, None]
    if "mask" not in past:
        past = {"mask": column.new_ones(batch, 1, seen, 1)}
    return _grow(state, past, "mask", column)[:, 0, :, 0]
