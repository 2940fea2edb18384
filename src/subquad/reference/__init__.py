"""Every mechanism as plain, dense code to read, and to test the engines against.

Nothing here imports an engine, and nothing is fast: the code forms all pairs, and loops over tokens where that reads better. It
runs in the precision of its inputs. Tests call it in float64 for the true values, and in the precision under test for a fair
comparison.

A reference is a function of the mechanism, query (B, H, N, D), key (B, H, M, D) and value (B, H, M, Dv). These have the same
number of heads, and zeros in pads. By keyword it gets `is_causal`, `allowed` (B, 1, N, M), which is True where causality and
padding let a query see a key, `real` (B, M), which is False for pads, `global_mask`, `attn_mask`, `scale`, `weights`, the
buffers and parameters by name, and `hidden` (B, M, width), the tokens. It returns (B, H, N, Dv).

B batch, H heads, N queries, M keys, D channels, Dv value channels, m features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.reference import (
    buckets,
    clustered,
    efficient,
    feature_maps,
    hybrid,
    induced,
    linear,
    linformer,
    nystrom,
    patterns,
    performer,
    plain,
    pooled,
    rfa,
    softmax,
    svd,
    taylor,
)

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "softmax": softmax.attention,
    "linear": linear.attention,
    "taylor": taylor.attention,
    "plain": plain.attention,
    "efficient": efficient.attention,
    "performer": performer.attention,
    "rfa": rfa.attention,
    "hedgehog": feature_maps.attention,
    "t2r": feature_maps.attention,
    "hybrid": hybrid.attention,
    "local": patterns.local,
    "sparse_strided": patterns.sparse_strided,
    "sparse_fixed": patterns.sparse_fixed,
    "longformer": patterns.longformer,
    "bigbird": patterns.bigbird,
    "reformer": buckets.reformer,
    "routing": buckets.routing,
    "clustered": clustered.attention,
    "linformer": linformer.attention,
    "nystrom": nystrom.attention,
    "pooled": pooled.attention,
    "induced": induced.attention,
    "svd": svd.attention,
}


def covers(mechanism: Any) -> bool:
    """Whether `attention` can compute it: the mechanism brings a reference, or has one here."""
    return type(mechanism).reference is not None or mechanism.info.name in FUNCTIONS


def attention(
    mechanism: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    weights: Mapping[str, Tensor] | None = None,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    hidden: Tensor | None = None,
    global_mask: Tensor | None = None,
) -> Tensor:
    """The output of `mechanism` with the buffers and parameters `weights`. The arguments are those of `subquad.attention`."""
    queries, keys = query.shape[2], key.shape[2]
    allowed = torch.ones(query.shape[0], 1, queries, keys, dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed.tril()
    if key_padding_mask is not None:
        allowed = allowed & key_padding_mask[:, None, None, :]
        key, value = (x.masked_fill(~key_padding_mask[:, None, :, None], 0) for x in (key, value))
        hidden = hidden.masked_fill(~key_padding_mask[:, :, None], 0) if hidden is not None else None
    real = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    groups = query.shape[1] // key.shape[1]
    function = type(mechanism).reference or FUNCTIONS[mechanism.info.name]
    return function(
        mechanism,
        query,
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        is_causal=is_causal,
        allowed=allowed,
        real=real,
        global_mask=global_mask,
        attn_mask=attn_mask,
        scale=scale,
        weights=weights or {},
        hidden=hidden,
    )
