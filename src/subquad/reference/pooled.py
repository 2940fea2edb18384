"""Softmax over the keys within a window and the means of segments, which are additional keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.reference import softmax


def attention(
    mechanism: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    real: Tensor,
    scale: float | None,
    **_: Any,
) -> Tensor:
    """Sequence by sequence, over its real tokens; the rows of pads are 0."""
    out = torch.zeros_like(query[..., :1].expand(*query.shape[:3], value.shape[-1]) * value[..., :1].sum())
    for b in range(query.shape[0]):
        tokens = real[b].nonzero().squeeze(1)
        if len(tokens):
            found = _row(mechanism, query[b, :, tokens], key[b, :, tokens], value[b, :, tokens], is_causal, scale)
            out = out.index_put((torch.tensor(b), torch.arange(query.shape[1])[:, None], tokens), found)
    return out


def _row(mechanism: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    """One sequence without pads, (H, n, D)."""
    length = key.shape[1]
    starts = range(0, length, mechanism.stride)
    keys, values = (
        torch.cat([x, *(x[:, s : s + mechanism.stride].mean(1, keepdim=True) for s in starts)], dim=1) for x in (key, value)
    )
    i, j = torch.arange(length)[:, None], torch.arange(length)
    ends = torch.tensor([s + mechanism.stride for s in starts])  # the token after a segment
    window = (i - j).abs() <= mechanism.window
    segments = torch.ones(length, len(ends), dtype=torch.bool)
    if is_causal:
        window, segments = window & (j <= i), ends <= i
    allowed = torch.cat([window, segments], dim=1)
    return softmax.attention(None, query, keys, values, allowed=allowed, attn_mask=None, scale=scale)
