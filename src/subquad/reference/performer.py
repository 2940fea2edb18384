"""o_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j), phi(x) random features of sqrt(s) x.

The five maps are those of the papers, with nothing subtracted from their exponents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.reference.weighted import average


def attention(
    mechanism: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    allowed: Tensor,
    scale: float | None,
    weights: Mapping[str, Tensor],
    **_: Any,
) -> Tensor:
    dim = query.shape[-1]
    root = math.sqrt(dim**-0.5 if scale is None else scale)
    w = weights["projection"].to(query.dtype)
    x, y = query * root, key * root
    p: Tensor | float | None = mechanism.p
    if mechanism.kind == "favor++" and p is None:
        pairs = (x.unsqueeze(3) + y.unsqueeze(2)).square().sum(-1)  # (B, H, N, M)
        p = pairs.mean((1, 2, 3), keepdim=True) / dim if pairs.numel() else 0.0
    return average(phi(x, w, mechanism.kind, p) @ phi(y, w, mechanism.kind, p).mT * allowed, value)


def phi(x: Tensor, w: Tensor, kind: str, p: Tensor | float | None = None) -> Tensor:
    """x (..., n, D), w (m, D) -> (..., n, m or 2m)."""
    m, dim = w.shape
    u = x @ w.mT
    square = x.square().sum(-1, keepdim=True)
    if kind == "positive":
        return (u - square / 2).exp() / math.sqrt(m)
    if kind == "hyperbolic":
        return torch.cat([u.exp(), (-u).exp()], dim=-1) * (-square / 2).exp() / math.sqrt(2 * m)
    if kind == "trig":
        return torch.cat([u.sin(), u.cos()], dim=-1) * (square / 2).exp() / math.sqrt(m)
    if kind == "relu":
        return u.relu() + 1e-3
    p = torch.as_tensor(p, dtype=x.dtype, device=x.device)
    a = (1 - 2 * p - ((2 * p + 1) ** 2 + 8 * p).sqrt()) / 16
    exponent = a * w.square().sum(-1) + (1 - 4 * a).sqrt() * u - square / 2
    return (1 - 4 * a) ** (dim / 4) * exponent.exp() / math.sqrt(m)
