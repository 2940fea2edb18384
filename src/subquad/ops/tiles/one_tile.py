"""One tile in PyTorch: its rows and keys as views, its softmax and its gradients.

The fused kernel returns t + log w instead of the largest score t and the sum w = sum_j e^(s_j - t), so its results are wrong
where scores are so large that adding log w does not change them. It also adds a mask to the scores, which makes NaN of a masked
score that has overflowed or is NaN, and it makes a number of some scores that are NaN. The plain operations replace masked
scores instead.

Z sequences, S subsequences of each, G query heads per key-value head, n queries, m keys, W channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.ops.tiles.group import MASKED, Tile
from subquad.ops.tiles.wide import Wide


def tile_rows(x: Tensor, tile: Tile) -> Tensor:
    """The tile's rows of x (Z, S, G, n, W): (Z S, G, rows, W) for a single block, otherwise (Z S, blocks, G rows, W)."""
    x = x[:, :, :, tile.first_row : tile.first_row + tile.blocks * tile.rows].flatten(0, 1)
    if tile.blocks == 1:
        return x
    return x.unflatten(2, (tile.blocks, tile.rows)).transpose(1, 2).flatten(2, 3)


def undo_tile_rows(x: Tensor, tile: Tile, query: Tensor) -> Tensor:
    """The inverse of `tile_rows`: (Z, S, G, blocks rows, W)."""
    if tile.blocks > 1:
        x = x.unflatten(2, (-1, tile.rows)).transpose(1, 2).flatten(2, 3)
    return x.unflatten(0, query.shape[:2])


def tile_keys(x: Tensor, tile: Tile, query: Tensor) -> Tensor:
    """The tile's keys of x (Z, S, m, W), as views: (Z S, blocks, columns, W), for a single block (Z S, G, columns, W)."""
    x = x.flatten(0, 1)[:, tile.first_column : tile.first_column + (tile.blocks - 1) * tile.column_step + tile.columns]
    if tile.blocks == 1:
        return x.unsqueeze(1).expand(-1, query.shape[2], -1, -1)
    if tile.column_step == 0:
        return x.unsqueeze(1).expand(-1, tile.blocks, -1, -1)
    return x.unfold(1, tile.columns, tile.column_step).mT


def add_key_gradients(total: Tensor, new: Tensor, tile: Tile) -> None:
    """Add new (Z S, blocks, columns, W), or a single block's (Z S, G, columns, W), to the keys of total (Z S, m, W)."""
    step, columns = tile.column_step, tile.columns
    if step == 0 or tile.blocks == 1:
        total[:, tile.first_column : tile.first_column + columns] += new.sum(1)
        return
    for start in range(0, columns, step):
        width = min(step, columns - start)
        first = tile.first_column + start
        span = total[:, first : first + (tile.blocks - 1) * step + width]
        span.unfold(1, width, step).mT.add_(new[:, :, start : start + width])


def _tile_mask(tile: Tile, queries: Tensor) -> Tensor | None:
    """The mask, repeated for the query heads of a key-value head."""
    mask = tile.mask
    if mask is None or mask.shape[2] in (1, queries.shape[2]):
        return mask
    return mask.repeat(1, 1, queries.shape[2] // mask.shape[2], 1)


def attend_tile(query: Tensor, key: Tensor, value: Tensor, tile: Tile, wide: Wide) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention of (Z, h, n, W), the largest score and `sum e^(score - largest)`, (Z, h, n, 1).

    The fused kernel gives only the logarithm of the sum of e^score, which takes the place of the largest score; the sum is then
    1. Rows that see no key have `MASKED` and 0.
    """
    mask = _tile_mask(tile, query)
    if wide.is_fused and _has_fused_kernel(query, key):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, tile.is_causal, attn_mask=mask, scale=wide.scale
        )
        top = lse.unsqueeze(-1)
        empty = _empty_rows(mask, key[..., -1] if wide.has_bias else None, tile)
        if empty is None:
            return out, top, torch.ones_like(top)
        empty = empty.unsqueeze(-1)
        return out.masked_fill(empty, 0), top.masked_fill(empty, MASKED), torch.ones_like(top).masked_fill(empty, 0)
    scores = _scores(query, key, mask, tile, wide)
    top = scores.amax(-1, keepdim=True) if key.shape[2] else query.new_full((*query.shape[:3], 1), MASKED)
    weights = (scores - top.masked_fill(top == MASKED, 0)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ value / total.masked_fill(total == 0, 1), top, total


def _empty_rows(mask: Tensor | None, bias: Tensor | None, tile: Tile) -> Tensor | None:
    """The rows (Z or 1, h or 1, n or 1) of a tile that see no key; None if there is none. `bias` is (Z, h, columns).

    The fused kernel gives them a log-sum-exp of 0, which is also that of a single key whose score is 0.
    """
    if bias is None:
        return None if mask is None else mask.amax(-1) == MASKED
    allowed = bias.exp()  # 1 or 0
    if mask is None:
        seen = allowed.cumsum(-1) if tile.is_causal else allowed.sum(-1, keepdim=True)
        if tile.is_causal:  # query i sees the columns up to i, as far as there are any
            seen = seen[..., torch.arange(tile.rows, device=seen.device).clamp(max=tile.columns - 1)]
    else:
        seen = torch.einsum("zhnc,zhc->zhn", mask.exp(), allowed)
    return seen == 0


def tile_gradients(
    query: Tensor, key: Tensor, value: Tensor, results: Sequence[Tensor], tile: Tile, wide: Wide
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from the output's gradient and the output, top and total over all keys together."""
    (grad, out, top, total), mask = results, _tile_mask(tile, query)
    if wide.is_fused and _has_fused_kernel(query, key):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, (top + total.log()).squeeze(-1), 0.0, tile.is_causal, attn_mask=mask, scale=wide.scale
        )
    weights = (_scores(query, key, mask, tile, wide) - top).exp() / total
    inner = grad @ value.mT - (grad * out).sum(-1, keepdim=True)
    scores = weights * inner * wide.scale
    return scores @ key, scores.mT @ query, weights.mT @ grad


def _has_fused_kernel(query: Tensor, key: Tensor) -> bool:
    """Whether PyTorch has a fused kernel for these that returns the log-sum-exp as well."""
    return query.device.type == "cpu" and query.numel() > 0 and key.numel() > 0


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, tile: Tile, wide: Wide) -> Tensor:
    channels = slice(-1 if wide.has_bias else None)
    scores = query[..., channels] * wide.scale @ key[..., channels].mT
    if wide.has_bias:
        scores = scores.masked_fill(key[..., None, :, -1] == MASKED, MASKED)
    if mask is not None:
        scores = scores.masked_fill(mask == MASKED, MASKED)
    if tile.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, MASKED)
    return scores
