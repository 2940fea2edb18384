"""Choices that rounding may change: buckets of `reformer` and `routing`, codes and the largest weights of `clustered`.

Two scores that differ by less than their rounding errors may come out in either order, and another order selects other keys: a
*hash flip*. A pair of sequence and head is *undecided* if the margin of one of its choices in float64 is within rounding; only
there may results differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.reference.clustered import k_means, sign
from subquad.reference.taylor import unit

CHOOSING = ("reformer", "routing", "clustered")
ROUNDINGS = 8  # the error of a dot product, in units of eps |x| |w|


def undecided(mechanism: Any, q: Tensor, k: Tensor, real: Tensor | None, weights: dict[str, Tensor], eps: float) -> Tensor:
    """(B, H): whether a choice has a margin within rounding, for float64 q (B, H, N, D) and k (B, K, M, D), zero in pads."""
    k = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), dim=1)
    eps = eps * ROUNDINGS
    if mechanism.info.name == "clustered":
        return _clustered(mechanism, q, k, real, weights, eps)
    close = torch.zeros(q.shape[:2], dtype=torch.bool)
    for x in (q, k):
        if mechanism.info.name == "reformer":
            w = _each_head(weights["rotations"], q)  # (H, R, b/2, D)
            u, size = (torch.einsum("bhnd,hrcd->bhnrc", a, b) for a, b in ((x, w), (x.abs(), w.abs())))
            u, size = torch.cat([u, -u], dim=-1), torch.cat([size, size], dim=-1)
        else:
            w = _each_head(weights["centroids"], q)  # (H, b, D)
            u, size = unit(x) @ w.mT, unit(x).abs() @ w.abs().mT
        close |= (_is_close(u, size, eps) & (x != 0).any(-1).reshape(*x.shape[:3], *[1] * (u.dim() - 4))).flatten(2).any(-1)
    return close


def _each_head(w: Tensor, q: Tensor) -> Tensor:
    return w.double().repeat_interleave(q.shape[1] // w.shape[0], dim=0)


def _is_close(u: Tensor, size: Tensor, eps: float) -> Tensor:
    """Whether rounding may swap the two largest numbers of the last dimension."""
    if u.shape[-1] < 2:
        return torch.zeros(u.shape[:-1], dtype=torch.bool)
    top = u.topk(2, dim=-1).values
    return ~(top[..., 0] - top[..., 1] > eps * size.amax(-1))


def _clustered(mechanism: Any, q: Tensor, k: Tensor, real: Tensor | None, weights: dict[str, Tensor], eps: float) -> Tensor:
    w = weights["projection"].double()
    close = torch.zeros(q.shape[:2], dtype=torch.bool)
    for b in range(q.shape[0]):
        keys = torch.ones(k.shape[2], dtype=torch.bool) if real is None else real[b]
        shaping = keys if len(keys) == q.shape[2] else torch.ones(q.shape[2], dtype=torch.bool)
        for h in range(q.shape[1]):
            close[b, h] = _is_head_close(mechanism, q[b, h], k[b, h, keys], shaping, w, eps)
    return close


def _is_head_close(mechanism: Any, q: Tensor, k: Tensor, shaping: Tensor, w: Tensor, eps: float) -> bool:
    if not len(q) or not len(k):
        return False
    codes, size = q @ w.mT, q.abs() @ w.abs().mT
    if bool((~(codes.abs() > eps * size) & (size > 0)).any()):
        return True
    assignment = k_means(sign(codes), shaping, mechanism.clusters, mechanism.iterations)
    if not 0 < mechanism.topk < len(k):
        return False
    for c in assignment.unique():
        members = (assignment == c) & shaping
        mean, spread = (x[members].sum(0) / members.sum().clamp(min=1) for x in (q, q.abs()))
        scores, order = (k @ mean).sort(descending=True)
        last, rounding = mechanism.topk, eps * (k.abs() @ spread)[order]
        if not scores[last - 1] - scores[last] > rounding[last - 1] + rounding[last]:
            return True
    return False
