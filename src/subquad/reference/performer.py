"""o_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j), phi(x) random features of sqrt(s) x.

The five maps are those of the papers, without their constant factors, which cancel. Their exponentials leave even the range of
float64, so phi is given as e^b f: the factor e^b of a query cancels, and those of the keys are taken relative to the largest
one that the query sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
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
    norms = torch.zeros_like(w[:, 0]) if mechanism.regularized else w.square().sum(-1)  # all the same, or not
    f = phi(x, w, mechanism.kind, p, norms)[0]
    g, b = phi(y, w, mechanism.kind, p, norms)
    b = b.mT.masked_fill(~allowed, -torch.inf)  # (B, H, N, M)
    largest = F.pad(b.detach(), (1, 0), value=-torch.inf).amax(-1, keepdim=True)  # -inf where there are no keys
    return average((f @ g.mT) * (b - largest.masked_fill(largest == -torch.inf, 0)).exp(), value)


def phi(x: Tensor, w: Tensor, kind: str, p: Tensor | float | None, norms: Tensor) -> tuple[Tensor, Tensor]:
    """phi = e^b f: x (..., n, D), w (m, D) -> f (..., n, m or 2m), b (..., n, 1). `norms` are |w|^2, up to a constant."""
    u = x @ w.mT
    square = x.square().sum(-1, keepdim=True)
    if kind == "relu":
        return u.relu() + 1e-3, torch.zeros_like(square)
    if kind == "trig":
        return torch.cat([u.sin(), u.cos()], dim=-1), square / 2
    if kind == "hyperbolic":
        u = torch.cat([u, -u], dim=-1)
    elif kind == "favor++":
        p = torch.as_tensor(p, dtype=x.dtype, device=x.device)
        a = (1 - 2 * p - ((2 * p + 1) ** 2 + 8 * p).sqrt()) / 16
        u = a * norms + (1 - 4 * a).sqrt() * u
    peak = u.detach().amax(-1, keepdim=True)
    return (u - peak).exp(), peak - square / 2
