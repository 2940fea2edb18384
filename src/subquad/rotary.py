"""Rotary positions: rotate pairs of channels by angles that grow with the position (Su et al., 2021, arXiv:2104.09864).

    (x_c, x_(c+D/2)) <- (x_c cos a - x_(c+D/2) sin a, x_(c+D/2) cos a + x_c sin a),    a = position * base^(-2c/D)

The pairs are channel c and c + D/2, as in Llama.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def rotate(x: Tensor, position: Tensor, base: float) -> Tensor:
    """Rotate x (B, H, N, D), D even, by the angles of integer positions (B, N)."""
    return rotate_by(x, *cos_sin(x, position, base))


def cos_sin(x: Tensor, position: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, 1, N, D/2) of the angles for x (B, H, N, D)."""
    return tables(position, x.shape[-1], base, x.dtype)


def tables(position: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, 1, N, D/2) of the angles at positions (B, N), in float32 or, if higher, in `dtype`."""
    half = head_dim // 2
    # In float32 the angle at position 10^6 is off by 0.06.
    precise = torch.float32 if position.device.type == "mps" else torch.float64
    frequency = base ** (-torch.arange(half, device=position.device, dtype=precise) / half)
    angle = position[:, None, :, None].to(precise) * frequency
    dtype = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(dtype), angle.sin().to(dtype)


class Rotation(NamedTuple):
    """The rotary positions of some tokens, computed once for all layers of a model."""

    cos: Tensor  # (B, 1, N, D/2)
    sin: Tensor
    after: Tensor  # (B,), the position of the token after them


def rotate_by(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs of x (B, H, N, D) by the angles whose cosines and sines are given."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def positions(start: Tensor, length: int, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Positions (B, N) of the next tokens, counting the real tokens of each row, and the `start` (B,) of the tokens after."""
    if key_padding_mask is None:
        steps = torch.arange(length, device=start.device)
        return start[:, None] + steps, start + length
    counted = start[:, None] + key_padding_mask.cumsum(1)
    return (counted - 1).clamp(min=0), start + key_padding_mask.sum(1)
