"""Mechanisms whose features may be negative, computed by sums over keys: how far rounding takes them where the sums cancel.

    o_i = phi(q_i) S_i / (phi(q_i) . z_i),    S_i = sum_j phi(k_j) v_j^T,    z_i = sum_j phi(k_j)

The reference weighs pairs: numerator and denominator use the same weights, so rounding errors in the weights cancel in the quotient.
The mechanisms sum over keys, which makes them linear in the length, and there rounding errors do not cancel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.reference import performer, rfa, taylor


def cancels(mechanism: Any) -> bool:
    name = mechanism.info.name
    return name == "taylor" or (name == "rfa" and not mechanism.gated) or (name == "performer" and mechanism.kind == "trig")


def attention(
    mechanism: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    weights: dict[str, Tensor],
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """As `subquad.reference.attention`, for mechanisms that `cancels` is true of."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    real = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    key, value = (x.masked_fill(~real[:, None, :, None], 0) for x in (key, value))
    (fq, _), (fk, b) = features(mechanism, query, weights, scale), features(mechanism, key, weights, scale)
    b = b.masked_fill(~real[:, None, :, None], -math.inf)  # (B, H, M, 1)
    largest = F.pad(b.detach(), (0, 0, 1, 0), value=-math.inf).amax(2, keepdim=True)
    fk = fk * (b - largest.masked_fill(largest == -math.inf, 0)).exp()
    values = F.pad(value, (0, 1), value=1.0)
    if is_causal:
        sums = (fk.unsqueeze(-1) * values.unsqueeze(-2)).cumsum(2)  # (B, H, N, m, Dv + 1)
        out = (fq.unsqueeze(-2) @ sums).squeeze(-2)
    else:
        out = fq @ (fk.mT @ values)
    out, total = out[..., :-1], out[..., -1:]
    if mechanism.info.name == "rfa":
        return out / rfa._away_from_zero(total, mechanism.floor)
    return out / torch.where(total == 0, 1, total)


def features(mechanism: Any, x: Tensor, weights: dict[str, Tensor], scale: float | None) -> tuple[Tensor, Tensor]:
    """phi = e^b f of x (B, H, n, D)."""
    zero = torch.zeros_like(x[..., :1])
    if mechanism.info.name == "taylor":
        return torch.cat([taylor.unit(x), zero + 1], dim=-1), zero
    w = weights["projection"].to(x.dtype)
    if mechanism.info.name == "rfa":
        sigma = weights["sigma"].to(x.dtype)
        return rfa.phi(x, w * sigma.repeat_interleave(x.shape[1] // len(sigma), dim=0).unsqueeze(1)), zero
    return performer.phi(x * math.sqrt(x.shape[-1] ** -0.5 if scale is None else scale), w, "trig", None, w[:, 0])
