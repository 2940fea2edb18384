"""k-means in Hamming space, in PyTorch.

Codes are vectors of +1 and -1. In a row with n real codes, the initial centroids are those of rank floor(c n / C), where C is
the number of clusters, or n if that is smaller; each iteration replaces them by the signs of the sum of their members' codes.

B batch, H heads, N codes, C clusters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.masks import zero_pads
from subquad.ops.clustered.rows import gather_rows, piece_lengths, sum_rows


@torch.no_grad()
def assign(x: Tensor, real: Tensor | None, clusters: int, iterations: int) -> Tensor:
    """The clusters (B, H, N) of the signs of x (B, H, N, bits); only the `real` (B, N) codes influence clusters."""
    code = _sign(x)
    first, precedence = _initial_centroids(code, real, clusters)
    centroid = gather_rows(code, first)  # (B, H, C, bits)
    members = zero_pads(F.pad(code, (0, 1), value=1.0), real)  # the last column counts
    for _ in range(iterations):
        total = sum_rows(members, _nearest(code, centroid, precedence), clusters)
        centroid = torch.where(total[..., -1:] > 0, _sign(total[..., :-1]), centroid)
    return _nearest(code, centroid, precedence)


def _initial_centroids(code: Tensor, real: Tensor | None, clusters: int) -> tuple[Tensor, Tensor]:
    """Which codes are the initial centroids (B, H, C), and the precedence of clusters (C,) or (B, 1, 1, C), see `_nearest`."""
    batch, heads, queries, bits = code.shape
    rank = torch.arange(clusters, device=code.device)
    integer = torch.int32 if 3 * (bits + 1) * clusters < 2**31 else torch.int64  # the former is faster
    precedence = (clusters - 1 - rank).to(integer)
    if real is None:
        return (rank * queries // clusters).expand(batch, heads, clusters), precedence
    n = real.sum(-1, keepdim=True)  # (B, 1)
    count = n.clamp(max=clusters)
    first = torch.searchsorted(real.cumsum(-1), rank * n // count.clamp(min=1) + 1).clamp(max=queries - 1)  # (B, C)
    unused = (rank >= count)[:, None, None]
    precedence = torch.where(unused, precedence - (2 * bits + 1) * clusters, precedence)  # below all used clusters
    return first.unsqueeze(1).expand(batch, heads, clusters), precedence


def _nearest(code: Tensor, centroid: Tensor, precedence: Tensor) -> Tensor:
    """The nearest centroid (B, H, N), the first of equally near ones.

    The integers C (code . centroid_c) + precedence_c, with precedence_c = C - 1 - c modulo C, are all different, so their
    maximum identifies the centroid; `amax` is much faster than `argmax`.
    """
    nearest = []
    clusters = centroid.shape[2]
    lengths = piece_lengths(code.shape[2], code.shape[0] * code.shape[1] * clusters, at_once=False)
    for piece in code.split(lengths, dim=2):
        agreement = (piece @ centroid.mT).to(precedence.dtype)  # (B, H, n, C)
        nearest.append(clusters - 1 - torch.add(precedence, agreement, alpha=clusters).amax(-1) % clusters)
    return torch.cat(nearest, dim=2).to(torch.int64)


def _sign(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)
