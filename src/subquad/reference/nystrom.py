"""o = softmax(s q kl^T) pinv(softmax(s ql kl^T)) softmax(s ql k^T) v, for each sequence of the batch, over its real tokens.

ql and kl are means over segments, where the r-th of n real tokens is in segment floor(r m / n). With n <= m it is softmax
attention. The query of a pad counts as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


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
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for b, real in enumerate(allowed[:, 0].any(1)):  # (N,)
        q = query[b].masked_fill(~real[:, None], 0)  # (H, N, D)
        k, v = key[b, :, real], value[b, :, real]  # (H, n, D), (H, n, Dv)
        if real.sum() > mechanism.landmarks:
            ql, kl = (_landmarks(x, mechanism.landmarks) for x in (q[:, real], k))
            to, among, of = _softmax(q, kl, scale), _softmax(ql, kl, scale), _softmax(ql, k, scale)
            out[b] = to @ (_pinv(among, mechanism.iterations) @ (of @ v))
        elif real.any():
            out[b] = _softmax(q, k, scale) @ v
    return out if mechanism.conv is None else out + _convolve(value, weights["kernel"].to(value.dtype))


def _softmax(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (q @ k.mT * scale).softmax(-1)


def _landmarks(x: Tensor, count: int) -> Tensor:
    """x (H, n, D) -> (H, count, D)."""
    segment = torch.arange(x.shape[1]) * count // x.shape[1]
    return torch.stack([x[:, segment == i].mean(1) for i in range(count)], dim=1)


def _pinv(a: Tensor, iterations: int) -> Tensor:
    norms = a.sum(-2).amax(-1) * a.sum(-1).amax(-1)  # |A|_1 |A|_inf, A being positive
    z = a.mT / norms[:, None, None]
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    for _ in range(iterations):
        z = z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z))) / 4
    return z


def _convolve(value: Tensor, kernel: Tensor) -> Tensor:
    """value (B, H, N, Dv), kernel (H, size): sum_t kernel_t value_(i + t - size // 2), zero beyond both ends."""
    size, length = kernel.shape[1], value.shape[2]
    ends = value.new_zeros(*value.shape[:2], size // 2, value.shape[3])
    long = torch.cat([ends, value, ends], dim=2)
    return sum(kernel[:, t, None, None] * long[:, :, t : t + length] for t in range(size))  # type: ignore[return-value]
