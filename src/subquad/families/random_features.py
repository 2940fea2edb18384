"""Random directions for feature maps, drawn from a seed on the CPU in float64: the same bits on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def gaussian(count: int, dim: int, seed: int) -> Tensor:
    """(count, dim): independent rows w ~ N(0, I)."""
    return _normal(count, dim, _generator(seed))


def orthogonal(count: int, dim: int, seed: int, *, regularized: bool = False) -> Tensor:
    """(count, dim): blocks of `dim` orthogonal rows, each row alone distributed as N(0, I).

    Row lengths follow chi(dim), as for Gaussian vectors; with `regularized` they are all sqrt(dim).
    """
    generator = _generator(seed)
    blocks = []
    for _ in range(0, count, dim):
        q, r = torch.linalg.qr(_normal(dim, dim, generator))
        # QR leaves the signs of the rows to the algorithm: without this correction the directions are not uniform.
        blocks.append((q * r.diagonal().sign()).mT)
    directions = torch.cat(blocks)[:count]
    if regularized:
        return directions * dim**0.5
    return directions * _normal(count, dim, generator).norm(dim=-1, keepdim=True)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu")
