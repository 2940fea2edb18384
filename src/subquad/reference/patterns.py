"""Softmax over the pairs that a pattern allows: who sees whom, as plain loops and comparisons over positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.reference import softmax


def local(mechanism: Any, query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Tensor:
    i, j, call = _pairs(call)
    return _over(_window(i, j, mechanism.window, mechanism.dilation), query, key, value, **call)


def sparse_strided(mechanism: Any, query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Tensor:
    i, j, call = _pairs(call)
    stride = mechanism.stride or max(1, round(query.shape[2] ** 0.5))
    near, far = (i - j).abs() < stride, (i - j) % stride == 0
    return _over(_by_half(near, far, near | far, mechanism, query), query, key, value, **call)


def sparse_fixed(mechanism: Any, query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Tensor:
    i, j, call = _pairs(call)
    stride = mechanism.stride or max(1, round(query.shape[2] ** 0.5))
    own, summary = i // stride == j // stride, j % stride >= stride - mechanism.summary
    seen = _by_half(own, summary | (i == j), own | summary, mechanism, query)
    return _over(seen, query, key, value, **call)


def longformer(
    mechanism: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    weights: Mapping[str, Tensor],
    hidden: Tensor | None,
    **call: Any,
) -> Tensor:
    heads = query.shape[1]
    i, j, call = _pairs(call)
    dilations = mechanism.dilation if isinstance(mechanism.dilation, tuple) else (mechanism.dilation,) * heads
    window = torch.cat([_window(i, j, mechanism.window, d) for d in dilations], dim=1)
    chosen = call["global_mask"]
    rows = i < mechanism.num_global if chosen is None else chosen[:, None, :, None]
    columns = j < mechanism.num_global if chosen is None else chosen[:, None, None, :]
    out = _over(window | rows | columns, query, key, value, **call)
    if not mechanism.global_projections:
        return out
    assert hidden is not None

    def project(name: str) -> Tensor:
        weight, bias = (weights[f"global_{name}_{part}"].to(hidden.dtype) for part in ("weight", "bias"))
        width = value.shape[-1] if name == "value" else query.shape[-1]
        projected = (hidden @ weight.mT + bias).unflatten(-1, (-1, width)).transpose(1, 2)
        return projected.repeat_interleave(heads // projected.shape[1], dim=1)

    all_pairs = torch.ones_like(rows)
    return torch.where(rows, _over(all_pairs, project("query"), project("key"), project("value"), **call), out)


def bigbird(mechanism: Any, query: Tensor, key: Tensor, value: Tensor, *, weights: Mapping[str, Tensor], **call: Any) -> Tensor:
    i, _, call = _pairs(call)
    position = i[:, 0, :, 0]
    batch, heads, length, _ = query.shape
    first, last = (0, 0) if mechanism.mode == "etc" else ((mechanism.globals + 1) // 2, mechanism.globals // 2)
    if call["is_causal"]:
        last = 0
    seen = torch.zeros(batch, heads, length, length, dtype=torch.bool, device=query.device)
    for b in range(batch):
        blocks = -(-int(call["real"][b].sum()) // mechanism.block)
        block = position[b] // mechanism.block  # -1 for pads: the last row and column of the table, which stay empty
        for h in range(heads):
            table = torch.zeros(blocks + 1, blocks + 1, dtype=torch.bool, device=query.device)
            for n in range(blocks):
                visible = _visible(n, blocks, int(weights["draw"][h]), mechanism, first, last, call["is_causal"])
                table[n, sorted(visible)] = True
            seen[b, h] = table[block[:, None], block[None, :]]
    if mechanism.mode == "itc":
        return _over(seen, query, key, value, **call)
    groups = heads // weights["global_key"].shape[0]
    tokens = [weights[name].to(query.dtype).repeat_interleave(groups, dim=0) for name in ("global_key", "global_value")]
    key, value = (torch.cat([t.expand(batch, -1, -1, -1), x], dim=2) for t, x in zip(tokens, (key, value), strict=True))
    extra = torch.ones(*seen.shape[:3], tokens[0].shape[1], dtype=torch.bool, device=seen.device)
    real = call.pop("real")[:, None, :, None]
    allowed = torch.cat([extra & real, seen & call.pop("allowed")], dim=-1)
    return softmax.attention(mechanism, query, key, value, allowed=allowed, **call)


def _visible(n: int, blocks: int, key: int, mechanism: Any, first: int, last: int, is_causal: bool) -> set[int]:
    """The blocks that block n sees, among `blocks`."""
    side = mechanism.window // 2
    window = set(range(max(n - side, 0), min(n + side + 1, blocks)))
    tokens = {m for m in range(blocks) if m < first or m >= blocks - last}
    if n in tokens:
        return set(range(blocks))
    rest = [m for m in range(blocks) if m not in window | tokens]
    if is_causal:
        sample: list[int] = []
        for c, m in enumerate(m for m in rest if m < n):
            slot = c if c < mechanism.random else _random(key, c) % (c + 1)
            if slot < mechanism.random:
                sample[slot : slot + 1] = [m]
        return window | tokens | set(sample)
    chosen: list[int] = []
    for draw in range(min(mechanism.random, len(rest))):
        left = [m for m in rest if m not in chosen]
        chosen.append(left[_random(key, n * mechanism.random + draw) % len(left)])
    return window | tokens | set(chosen)


def _random(key: int, counter: int) -> int:
    return _mix(key ^ _mix(counter))


def _mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
    x = (x ^ x >> 15) * 0x735A2D97 % 2**32
    return x ^ x >> 15


def _pairs(call: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The positions of queries (B, 1, N, 1) and keys (B, 1, 1, N) among the real tokens; -1 for pads, which see nothing."""
    real = call["real"]
    position = torch.where(real, real.cumsum(1) - 1, -1)
    call = {**call, "allowed": call["allowed"] & real[:, None, :, None]}
    return position[:, None, :, None], position[:, None, None, :], call


def _window(i: Tensor, j: Tensor, window: int, dilation: int) -> Tensor:
    return ((i - j).abs() <= window * dilation) & ((i - j) % dilation == 0)


def _by_half(first: Tensor, second: Tensor, both: Tensor, mechanism: Any, query: Tensor) -> Tensor:
    """`both` in every head, or `first` in the first half of the heads and `second` in the others."""
    if mechanism.heads == "merged":
        return both
    head = torch.arange(query.shape[1], device=query.device)[None, :, None, None]
    return torch.where(head < (query.shape[1] + 1) // 2, first, second)


def _over(seen: Tensor, query: Tensor, key: Tensor, value: Tensor, *, allowed: Tensor, scale: float | None, **_: Any) -> Tensor:
    return softmax.attention(None, query, key, value, allowed=allowed & seen, attn_mask=None, scale=scale)
