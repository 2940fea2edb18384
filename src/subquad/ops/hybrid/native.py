"""Hybrid attention by two compiled kernels: the tile kernel for near keys, then the kernelized one, which merges the far keys.

The far keys of query i are those up to i - window - 1: causal kernelized attention of the queries from window + 1 on to the
keys from 0 on. Unless causal, those from i + window + 1 on follow in the same way, the sequence read backwards. With c the
level and t the sum of all weights relative to e^c, a near key has the share e^(score - c) / t of them, and a far one
phi(q) . phi(k) / d with d = t e^(c - log g). Given c, t and the merged output, the backward passes of both kernels are those
that they have on their own, with d for the denominators of the second one.

B batch, H query heads, K key-value heads, G = H / K query heads per key-value head, n tokens, D channels, Dv value channels, P
channels of a projected query or key.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from subquad.ops import kernelized, native_call, tiles
from subquad.ops.hybrid.rule import HybridRule, Inputs
from subquad.ops.kernelized.native import merge_backward, merge_forward
from subquad.ops.precision import upcast
from subquad.ops.sparse.block_tiles import window_tiles

_window_tiles = lru_cache(maxsize=256)(torch.inference_mode(False)(window_tiles))


def forward(inputs: Inputs, rule: HybridRule) -> tuple[Tensor, ...]:
    """The output (B, H, n, Dv), and top, total and far (B, H, n); see `pytorch.Results`."""
    rows = inputs.query.shape[:3]
    if not rows.numel():
        return empty_results(inputs)
    found = tiles.native.forward([_near(inputs, rule)], rows[2], rule.scale)
    out, top, total = (x.view(*rows, *x.shape[2:]) for x in found)
    far, log_mix = torch.zeros_like(top), inputs.log_mix.detach().to(out.dtype)
    for reverse in _directions(rule, rows[2]):
        queries, keys = _far_slices(rule, reverse)
        more = torch.zeros_like(far) if reverse else far
        results = [x[:, :, queries] for x in (out, top, total, more)]
        merge_forward(results, *_far(inputs, rule, queries, keys), log_mix, reverse=reverse)
        if reverse:
            far += more
    return out, top, total, far


def backward(
    grad: Tensor, inputs: Inputs, rule: HybridRule, out: Tensor, top: Tensor, total: Tensor, far: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, projected query and key, and that of log_mix for each sequence, (B, H)."""
    rows = inputs.query.shape[:3]
    if not rows.numel():
        return *(x.zero_() for x in empty_gradients(inputs)), top.new_zeros(rows[:2])
    grad, out = native_call.as_rows(grad).contiguous(), out.contiguous()
    grad_rows, out_rows, top_rows, total_rows = (x.flatten(0, 1) for x in (grad, out, top, total))
    near = tiles.native.backward(grad_rows, [_near(inputs, rule)], out_rows, top_rows, total_rows, rule.scale)
    d_query, d_key, d_value = (_with_heads(x, rows[0]) for x in near)
    d_projected = [native_call.empty_rows(x, x.shape[3]) for x in inputs[3:5]]
    d_log_mix = torch.zeros_like(top)
    denominators = total * (top - inputs.log_mix.detach().to(top.dtype).unsqueeze(-1)).exp()
    denominators = denominators.masked_fill_(far == 0, math.inf)
    if rows[2] <= rule.window + 1:
        for x in d_projected:
            x.zero_()
    for reverse in _directions(rule, rows[2]):
        queries, keys = _far_slices(rule, reverse)
        d_far = [d_projected[0][:, :, queries], d_projected[1][:, :, keys], d_value[:, :, keys]]
        if not reverse:
            d_projected[0][:, :, : rule.window + 1] = 0
            d_projected[1][:, :, -rule.window - 1 :] = 0
        own = 0 if reverse else 2  # the first pass writes the gradients of projected queries and keys, all else is added
        parts = [*d_far[:own], *(torch.empty_like(x) for x in d_far[own:])]
        rows_of = [x[:, :, queries] for x in (grad, out, denominators)]
        d_log_mix[:, :, queries] += merge_backward(parts, rows_of, *_far(inputs, rule, queries, keys), reverse=reverse)
        for x, more in zip(d_far[own:], parts[own:], strict=True):
            x += more
    return d_query, d_key, d_value, *d_projected, d_log_mix.sum(2)


def empty_results(inputs: Inputs) -> tuple[Tensor, ...]:
    """What `forward` returns, uninitialised."""
    rows, value = inputs.query.shape[:3], upcast(inputs.value)
    return value.new_empty(*rows, value.shape[3]), *(value.new_empty(rows) for _ in range(3))


def empty_gradients(inputs: Inputs) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, projected query and key that `backward` returns, uninitialised."""
    folded = _folded(*inputs[:3])
    near = (_with_heads(torch.empty_like(native_call.as_rows(x)), inputs.query.shape[0]) for x in folded)
    return *near, *(native_call.empty_rows(x, x.shape[3]) for x in inputs[3:5])


def _directions(rule: HybridRule, length: int) -> tuple[bool, ...]:
    """Whether to read the sequence backwards, for each pass over far keys."""
    if length <= rule.window + 1:
        return ()
    return (False,) if rule.is_causal else (False, True)


def _far_slices(rule: HybridRule, reverse: bool) -> tuple[slice, slice]:
    """The queries that have far keys, and the keys that are far from a query."""
    late, early = slice(rule.window + 1, None), slice(None, -rule.window - 1)
    return (early, late) if reverse else (late, early)


def _far(inputs: Inputs, rule: HybridRule, queries: slice, keys: slice) -> tuple[kernelized.Inputs, kernelized.KernelizedRule]:
    mask = None if inputs.mask is None else inputs.mask[:, keys]
    query, key, value = inputs.projected_query[:, :, queries], inputs.projected_key[:, :, keys], inputs.value[:, :, keys]
    feature_map = rule.feature_map(query.shape[3])
    return kernelized.Inputs(query, key, value, mask, True), kernelized.KernelizedRule(feature_map=feature_map)


def _near(inputs: Inputs, rule: HybridRule) -> tiles.TileGroup:
    query, key, value = _folded(*(upcast(x) for x in inputs[:3]))
    after = 0 if rule.is_causal else rule.window
    found = _window_tiles(rule.window, after, False, query.shape[3], query.dtype, query.device)
    bias = None
    if inputs.mask is not None:
        bias = tiles.additive_mask(inputs.mask, key.dtype).repeat_interleave(inputs.key.shape[1], dim=0).unsqueeze(1)
    return tiles.TileGroup(query, key, value, found, bias=bias)


def _folded(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B K, 1, G, n, D), (B K, 1, n, D) and (B K, 1, n, Dv), as tile groups have them."""
    query = query.unflatten(1, (key.shape[1], -1))
    query, key, value = (x.flatten(0, 1).unsqueeze(1) for x in (query, key, value))
    return query, key, value


def _with_heads(x: Tensor, batch: int) -> Tensor:
    """(B K, 1, G, n, D) as (B, H, n, D), (B K, 1, n, D) as (B, K, n, D)."""
    x = x.squeeze(1).unflatten(0, (batch, -1))
    return x.flatten(1, 2) if x.dim() == 5 else x
