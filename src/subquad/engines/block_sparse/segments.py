"""Segments: the mean of p consecutive keys, and of their values, stands for all of them.

When causal, a query sees the segments that end before it. A decode state holds the means of complete segments, and the tokens
of the incomplete one.

B batch, K key-value heads, n tokens, p tokens per segment, S rows in a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.block_sparse.key_sets import KeySet, Tokens, pad_to
from subquad.engines.call import Call
from subquad.engines.state_spec import Rows, StateSpec, TensorSpec
from subquad.engines.token_buffer import append_rows
from subquad.ops.precision import compute_dtype, needs_gradient, upcast
from subquad.ops.tiles import Tile, TileGroup, additive_mask
from subquad.state import StateTensors, rows

_ROWS = 256  # queries per block, rounded up to whole segments


@dataclass(frozen=True)
class Segments(KeySet):
    """The means of `size` consecutive keys and values; `is_causal` leaves out segments that do not end before the query."""

    STATE_NAMES: ClassVar[tuple[str, ...]] = ("segment", "segment_key", "segment_value")
    size: int
    is_causal: bool

    def tile_groups(self, x: Tokens) -> list[TileGroup]:
        if self.size > x.length:  # a single segment, which ends before no query
            return [] if self.is_causal else Segments(x.length, False).tile_groups(x)
        key, value, bias = self._means(x)
        if not self.is_causal:
            return [x.tile_group_with(key, value, bias=bias)]
        # A block of queries sees all segments before it, and some of those inside it.
        block = self.size * -(-_ROWS // self.size)
        inside = block // self.size
        i, s = torch.arange(block, device=key.device)[:, None], torch.arange(inside, device=key.device)
        mask = additive_mask(s < i // self.size, key.dtype)[None, None]
        whole, tail = x.length // block, x.length % block
        near = [Tile(0, block, whole, 0, inside, inside, mask)] if whole else []
        left = key.shape[2] - whole * inside
        near += [Tile(whole * block, tail, 1, whole * inside, 0, left, mask[:, :, :tail, :left])] if tail else []
        far = [Tile(a, min(block, x.length - a), 1, 0, 0, a // self.size) for a in range(0, x.length, block)]
        return [x.tile_group_with(key, value, tuple(near), bias), x.tile_group_with(key, value, tuple(far), bias)]

    def _means(self, x: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        """Means (B, K, segments, ...) over the keys that are not masked, and their bias, which masks segments without any."""
        missing = -x.length % self.size
        key, value = (pad_to(t, x.length + missing, -2).unflatten(2, (-1, self.size)) for t in (x.key, x.value))
        if x.bias is None:
            count = torch.full((key.shape[2], 1), self.size, dtype=key.dtype, device=key.device)
            count[-1] -= missing
            return key.sum(3) / count, value.sum(3) / count, None
        real = F.pad(x.bias == 0, (0, missing)).unflatten(1, (-1, self.size))  # (B or 1, segments, p)
        count = real.sum(2)  # (B or 1, segments)
        key, value = (
            t.masked_fill(~real[:, None, ..., None], 0).sum(3) / count.clamp(min=1)[:, None, :, None] for t in (key, value)
        )
        return key, value, additive_mask(count > 0, key.dtype)

    def state_spec(self, call: Call) -> StateSpec:
        """The tensors that `append_complete` adds: the numbers of the segments, -1 for unused rows, and their means."""
        kv_heads, kept, dtype = call.key.shape[1], Rows(2 * call.seen + 1), compute_dtype(call.key)
        return {
            "segment": TensorSpec((kv_heads, kept, 1), torch.int64, range=(-1, call.seen // self.size - 1)),
            "segment_key": TensorSpec((kv_heads, kept, call.key.shape[3]), dtype),
            "segment_value": TensorSpec((kv_heads, kept, call.value.shape[3]), dtype),
        }

    def append_complete(self, state: StateTensors, start: Tensor, new: int) -> StateTensors:
        """Append the segments that the last `new` tokens have completed; there were `start` (B,) tokens before them."""
        position, now = rows(state["number"]), state["count"]
        assert isinstance(now, Tensor)
        base, count = start // self.size, new // self.size + 1
        slot = position // self.size - base.reshape(-1, 1, 1, 1)  # (B, K, S, 1)
        slot = torch.where((position >= 0) & (slot >= 0) & (slot < count), slot, count)
        number = base[:, None] + torch.arange(count, device=base.device)  # (B, count)
        number = number.masked_fill((number + 1) * self.size > now[:, None], -1)
        added = {"segment": number[:, None, :, None].expand(-1, position.shape[1], -1, -1)}
        for name in ("key", "value"):
            x = upcast(rows(state[name]))
            total = x.new_zeros(*x.shape[:2], count + 1, x.shape[-1]).scatter_add(2, slot.expand_as(x), x)
            added[f"segment_{name}"] = total[:, :, :count] / self.size
        return append_rows(state, added, recorded=needs_gradient(*added.values()))

    def complete(self, state: StateTensors, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the complete segments, and which of them queries at i (B, 1, n, 1) see, (B, K, n, segments)."""
        number, key, value = (rows(state[name]) for name in Segments.STATE_NAMES)
        number = number.squeeze(-1).unsqueeze(2)
        return key, value, (number >= 0) & ((number + 1) * self.size <= i)

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        return torch.zeros_like(j, dtype=torch.bool)  # means only, no single tokens

    def seen_later(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        return j // self.size >= now // self.size

    def max_seen_later(self, now: int, heads: int) -> int:
        return self.size
