"""The means of complete segments in a decode state, and the tokens of the incomplete one.

B batch, K key-value heads, n tokens, p tokens per segment, S rows in a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.state_spec import Rows, StateSpec, TensorSpec
from subquad.engines.token_buffer import append_rows
from subquad.ops.precision import compute_dtype, needs_gradient, upcast
from subquad.state import StateTensors, rows


@dataclass(frozen=True)
class Segments:
    """What a decode state keeps of segments of `size` tokens."""

    STATE_NAMES: ClassVar[tuple[str, ...]] = ("segment", "segment_key", "segment_value")
    size: int

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
