"""Segments: the means of p keys, and of their p values, in a row, which stand for all of them.

Where causal, a query sees the segments that end before it. A decode state holds the means of finished segments, and the tokens
of the one that is not finished.

B batch, K key-value heads, n tokens, p tokens a segment, S rows in a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines import token_buffer as store
from subquad.engines.block_sparse.key_sets import KeySet, Tokens
from subquad.engines.block_sparse.plan import Part, Tile, barred_unless
from subquad.engines.block_sparse.softmax import pad_to
from subquad.ops.precision import needs_gradient, upcast
from subquad.state import StateTensors

_ROWS = 256  # queries in a block, about


@dataclass(frozen=True)
class Segments(KeySet):
    """The means of `size` keys and values in a row; `is_causal` leaves out segments that do not end before the query."""

    ROWS: ClassVar[tuple[str, ...]] = ("segment", "segment_key", "segment_value")
    size: int
    is_causal: bool

    def parts(self, x: Tokens) -> list[Part]:
        if self.size > x.length:  # one segment, which no query comes after
            return [] if self.is_causal else Segments(x.length, False).parts(x)
        key, value, bias = self._means(x)
        if not self.is_causal:
            return [x.meets(key, value, bias=bias)]
        # A block of queries sees all segments before it, and some of those inside it.
        rows = self.size * -(-_ROWS // self.size)
        inside = rows // self.size
        i, s = torch.arange(rows, device=key.device)[:, None], torch.arange(inside, device=key.device)
        mask = barred_unless(s < i // self.size, key.dtype)[None, None]
        whole, tail = x.length // rows, x.length % rows
        near = [Tile(0, rows, whole, 0, inside, inside, mask)] if whole else []
        left = key.shape[2] - whole * inside
        near += [Tile(whole * rows, tail, 1, whole * inside, 0, left, mask[:, :, :tail, :left])] if tail else []
        far = [Tile(a, min(rows, x.length - a), 1, 0, 0, a // self.size) for a in range(0, x.length, rows)]
        return [x.meets(key, value, tuple(near), bias), x.meets(key, value, tuple(far), bias)]

    def _means(self, x: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        """Means over the keys that are not barred, (B, K, segments, ...), and their bias: barred where there are none."""
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
        return key, value, barred_unless(count > 0, key.dtype)

    def finish(self, state: StateTensors, start: Tensor, new: int) -> StateTensors:
        """Add the segments that the last `new` tokens have finished, where `start` (B,) were there before."""
        position, now = store.rows(state["number"]), state["count"]
        assert isinstance(now, Tensor)
        base, count = start // self.size, new // self.size + 1
        slot = position // self.size - base.reshape(-1, 1, 1, 1)  # (B, K, S, 1)
        slot = torch.where((position >= 0) & (slot >= 0) & (slot < count), slot, count)
        number = base[:, None] + torch.arange(count, device=base.device)  # (B, count)
        number = number.masked_fill((number + 1) * self.size > now[:, None], -1)
        rows = {"segment": number[:, None, :, None].expand(-1, position.shape[1], -1, -1)}
        for name in ("key", "value"):
            x = upcast(store.rows(state[name]))
            total = x.new_zeros(*x.shape[:2], count + 1, x.shape[-1]).scatter_add(2, slot.expand_as(x), x)
            rows[f"segment_{name}"] = total[:, :, :count] / self.size
        return store.append(state, rows, needs_gradient(*rows.values()))

    def shown(self, state: StateTensors, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the finished segments, and which of them queries at i (B, 1, n, 1) see, (B, K, n, segments)."""
        number, key, value = (store.rows(state[name]) for name in Segments.ROWS)
        number = number.squeeze(-1).unsqueeze(2)
        return key, value, (number >= 0) & ((number + 1) * self.size <= i)

    def sees(self, i: Tensor, j: Tensor, heads: Tensor) -> Tensor:
        return torch.zeros_like(j, dtype=torch.bool)  # no token by itself

    def keeps(self, j: Tensor, now: Tensor, heads: Tensor) -> Tensor:
        return j // self.size >= now // self.size

    def room(self, now: int, heads: int) -> int:
        return self.size
