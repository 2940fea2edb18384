"""Positions of tokens, added to their embeddings or to the scores. Rotary positions are in `subquad.rotary`.

B batch, H heads, N queries, M keys.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import torch
from torch import Tensor, nn

from subquad.errors import InputError
from subquad.models.configuration import SubquadConfig


class Sinusoidal(nn.Module):
    """sqrt(dim) x + [sin(p f), cos(p f)],  f_c = 10000^(-2c/dim). Vaswani et al., 2017, arXiv:1706.03762, section 3.5.

    For an odd dim, the sines and cosines of dim + 1 without the last one.
    """

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__()
        self.dim = config.hidden_size

    def forward(self, x: Tensor, position: Tensor, _: int) -> Tensor:
        """x (B, N, dim) at positions (B, N)."""
        half = (self.dim + 1) // 2
        wide = torch.float32 if x.device.type == "mps" else torch.float64
        frequency = 10000.0 ** (-torch.arange(half, device=x.device, dtype=wide) / half)
        angle = position.unsqueeze(-1).to(wide) * frequency  # (B, N, dim/2)
        wave = torch.cat([angle.sin(), angle.cos()], dim=-1)[..., : self.dim]
        return x * math.sqrt(self.dim) + wave.to(x.dtype)


class Learned(nn.Module):
    """x + table[p]."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__()
        assert config.max_position_embeddings is not None
        self.table = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, x: Tensor, position: Tensor, longest: int) -> Tensor:
        """x (B, N, dim) at positions (B, N), all below `longest`."""
        size = self.table.num_embeddings
        if longest > size and not position.is_meta:
            longest = int(position.max()) + 1 if position.numel() else 0  # pads take no position
        if longest > size:
            raise InputError(
                f"the learned table has max_position_embeddings={size} positions; got a sequence of {longest} tokens. "
                "Pass fewer tokens, build a model with a larger table, or choose position='rotary', which has no limit."
            )
        return x + self.table(position)


class RelativeBias(nn.Module):
    """A learned bias per head for each bucket of distances j - i: exact when near, logarithmic when far.

    Raffel et al., 2020, arXiv:1910.10683, section 2.1. All layers share it.
    """

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__()
        self.is_causal = config.is_decoder
        self.max_distance = config.relative_attention_max_distance
        least = 2 if self.is_causal else 4
        buckets = config.relative_attention_num_buckets
        if buckets < least or buckets % 2:
            raise InputError(f"relative_attention_num_buckets must be even and at least {least}; got {buckets}.")
        self.table = nn.Embedding(buckets, config.num_attention_heads)
        if self._exact >= self.max_distance:
            raise InputError(
                f"relative_attention_max_distance must be above the number of exact buckets, {self._exact}; "
                f"got {self.max_distance}."
            )

    def forward(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, H, N, M) for positions (B, N) and (B, M)."""
        return self.table(self.bucket(key[:, None, :] - query[:, :, None])).movedim(-1, 1).to(dtype)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance j - i."""
        far = distance.neg().clamp(min=0) if self.is_causal else distance.abs()
        borders = torch.tensor(self.borders(), dtype=far.dtype, device=far.device)
        bucket = far.clamp(max=self._exact) + torch.bucketize(far, borders, right=True)
        return bucket if self.is_causal else bucket + (distance > 0) * self._each

    def borders(self) -> list[int]:
        """The smallest distance of each wide bucket but the first: exact (max/exact)^(k/n), rounded up, k = 1..n-1."""
        n, exact, longest = self._each - self._exact, self._exact, self.max_distance
        powers = (exact ** (n - k) * longest**k for k in range(1, n))  # whole numbers, so that rounding shifts no border
        return [bisect_left(range(longest), power, key=lambda distance: distance**n) for power in powers]

    @property
    def _each(self) -> int:
        """Buckets per direction."""
        return self.table.num_embeddings if self.is_causal else self.table.num_embeddings // 2

    @property
    def _exact(self) -> int:
        return self._each // 2


class Alibi(nn.Module):
    """-m_h |i - j|, the slopes m_h a geometric sequence. Press et al., 2022, arXiv:2108.12409."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads

    def forward(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, H, N, M) for positions (B, N) and (B, M)."""
        slope = torch.tensor(self.slopes(), device=query.device, dtype=dtype)[:, None, None]
        return -slope * (key[:, None, :] - query[:, :, None]).abs().unsqueeze(1)

    def slopes(self) -> list[float]:
        """2^(-8h/H) for h = 1..H; if H is no power of two, those of the power below and every second one of the power above."""
        below = 2 ** math.floor(math.log2(self.heads))
        slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
        return slopes + [2 ** (-4 * h / below) for h in range(1, 2 * below + 1, 2)][: self.heads - below]


EMBEDDED = {"sinusoidal": Sinusoidal, "learned": Learned}
BIASES = {"relative_bias": RelativeBias, "alibi": Alibi}
