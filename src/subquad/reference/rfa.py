"""S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t^T token by token, or plain sums without the gate.

phi(x) = m^(-1/2) [sin(w.x/|x|), cos(w.x/|x|)].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.reference.taylor import unit


def attention(
    mechanism: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    allowed: Tensor,
    weights: Mapping[str, Tensor],
    hidden: Tensor | None,
    **_: Any,
) -> Tensor:
    heads = query.shape[1]
    sigma = _per_head(weights["sigma"], heads, query)  # (H, D)
    w = weights["projection"].to(query.dtype) * sigma.unsqueeze(1)  # (H, m, D)
    fq, fk = phi(query, w), phi(key, w)
    if not mechanism.gated or query.shape[2] == 0:
        pairs = fq @ fk.mT * allowed
        return pairs @ value / _away_from_zero(pairs.sum(-1, keepdim=True), mechanism.floor)

    assert hidden is not None
    gate_weight, gate_bias = (_per_head(weights[name], heads, query) for name in ("gate_weight", "gate_bias"))
    gate = (hidden @ gate_weight.mT + gate_bias).sigmoid().mT  # (B, H, M)
    real = allowed[:, :, -1]  # (B, 1, M)
    outputs = []
    state = torch.zeros_like(fk[:, :, 0].unsqueeze(-1) * value[:, :, 0].unsqueeze(-2))  # (B, H, 2m, Dv)
    total = torch.zeros_like(fk[:, :, 0])
    for t in range(query.shape[2]):
        keep = torch.where(real[:, :, t], gate[:, :, t], 1).unsqueeze(-1)
        new = torch.where(real[:, :, t], 1 - gate[:, :, t], 0).unsqueeze(-1) * fk[:, :, t]
        state = keep.unsqueeze(-1) * state + new.unsqueeze(-1) * value[:, :, t].unsqueeze(-2)
        total = keep * total + new
        out = (fq[:, :, t].unsqueeze(-2) @ state).squeeze(-2)
        outputs.append(out / _away_from_zero((fq[:, :, t] * total).sum(-1, keepdim=True), mechanism.floor))
    return torch.stack(outputs, dim=2)


def phi(x: Tensor, w: Tensor) -> Tensor:
    u = unit(x) @ w.mT
    return torch.cat([u.sin(), u.cos()], dim=-1) / w.shape[1] ** 0.5


def _per_head(weight: Tensor, heads: int, like: Tensor) -> Tensor:
    return weight.to(like.dtype).repeat_interleave(heads // weight.shape[0], dim=0)


def _away_from_zero(x: Tensor, floor: float) -> Tensor:
    floor = min(floor, torch.finfo(x.dtype).max)
    return torch.where(x.abs() < floor, torch.full_like(x, floor).copysign(x), x)
