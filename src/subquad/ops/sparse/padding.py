"""Where the real tokens of a batch are, and the order in which a plan takes them.

B batch, H heads, n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.masks import put_back, real_first, take_tokens, zero_pads


class Padding(NamedTuple):
    """Without a mask, all is None.

    Args:
        lengths: (B,), the numbers of real tokens.
        span: (B, 2), the first real token and their number: the real tokens are adjacent, and the kernel reads no others.
        real: (B, n) bool, where there is no span: the real tokens, which come first; pads are 0.
        order: (B, n), the order of the tokens in the plan; None: as they are.
    """

    lengths: Tensor | None = None
    span: Tensor | None = None
    real: Tensor | None = None
    order: Tensor | None = None

    @staticmethod
    def of(mask: Tensor, with_spans: bool, is_shiftable: bool) -> Padding:
        """Of a mask (B, n); unless `is_shiftable`, all sequences must start at the first token."""
        if with_spans:
            span = _span(mask)
            if span is not None and (is_shiftable or not span[:, 0].any()):
                return Padding(span[:, 1], span)
        order, real = real_first(mask)
        lengths = real.sum(1)
        if with_spans:
            return Padding(lengths, torch.stack([torch.zeros_like(lengths), lengths], dim=1), None, order)
        return Padding(lengths, None, real, order)

    def take(self, x: Tensor) -> Tensor:
        """x (B, H, n, W) in the order of the plan."""
        x = x if self.order is None else take_tokens(x, self.order)
        return zero_pads(x, self.real)

    def take_rows(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The same of several tensors (B, H, n, W) or (B, H, n)."""
        return [self.take(x) if x.dim() == 4 else self.take(x.unsqueeze(-1)).squeeze(-1) for x in rows]

    def put_back(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of `take_rows`; 0 for pads."""
        if self.order is None:
            return list(rows)
        order, found = self.order, [zero_pads(x if x.dim() == 4 else x.unsqueeze(-1), self.real) for x in rows]
        return [put_back(x, order).view(given.shape) for x, given in zip(found, rows, strict=True)]


def _span(mask: Tensor) -> Tensor | None:
    """(B, 2): the first real token and their number; None if there are pads between real tokens."""
    count = mask.sum(1)
    first = mask.to(torch.int8).argmax(1)
    starts = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    return torch.stack([first, count], dim=1) if bool((starts <= 1).all()) else None
