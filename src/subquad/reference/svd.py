"""o = A_r v, A_r the sum of the r largest s_i u_i v_i^T of A = softmax(s q k^T), over the real tokens of each sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attention(
    mechanism: Any, query: Tensor, key: Tensor, value: Tensor, *, allowed: Tensor, scale: float | None, **_: Any
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for b, real in enumerate(allowed[:, 0].any(1)):  # (N,)
        q, k, v = query[b, :, real], key[b, :, real], value[b, :, real]  # (H, n, ...)
        out[b, :, real] = _truncate((q @ k.mT * scale).softmax(-1), mechanism.rank) @ v
    return out


def _truncate(a: Tensor, rank: int) -> Tensor:
    if a.shape[-1] <= rank:
        return a
    is_finite = a.isfinite().all(-1).all(-1)[..., None, None]  # others have no decomposition
    wide = torch.where(is_finite, a, 0).to(torch.promote_types(a.dtype, torch.float32))  # torch has no SVD in half precision
    u, s, vt = torch.linalg.svd(wide)
    return torch.where(is_finite, (u[..., :rank] * s[..., None, :rank]) @ vt[..., :rank, :], torch.nan).to(a.dtype)
