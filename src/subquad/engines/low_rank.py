"""The low-rank engine: queries attend to a few summaries of the sequence instead of its keys.

B batch, H query heads, K key-value heads, N tokens, M keys, D channels, m summaries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.engines import dense
from subquad.masks import real_first, take_tokens
from subquad.ops import dispatch, tiles
from subquad.ops.double_backward import forbid_double_backward
from subquad.ops.sparse.tokens import Tokens

_LARGE = 2**20  # numbers in the queries or keys from which the compiled kernel is faster than PyTorch's


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """`softmax(scale q k^T) v` over the keys where `mask` (B, M) is True; zero if it is nowhere."""
    sizes = query.numel(), key.numel()
    if dispatch.can_use_compiled(query, key, value, mask) and min(sizes) > 0 and max(sizes) >= _LARGE:
        x = Tokens.of(query, key, value, mask)
        all_pairs = x.tile_group_with(x.key, x.value, bias=x.bias)
        out, _ = tiles.attend([all_pairs], x.length, query.shape[-1] ** -0.5 if scale is None else scale)
        return out.unflatten(0, query.shape[:2])
    return dense.attend_masked(query, key, value, None if mask is None else mask[:, None, None, :], scale)


def real_tokens_first(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """`x` (B, H, N, D) with the real tokens of each row first, in their order."""
    return x if key_padding_mask is None else take_tokens(x, real_first(key_padding_mask)[0])


def segment_members(key_padding_mask: Tensor | None, like: Tensor, count: int) -> Tensor:
    """Which of `count` segments contains which token of `like` (B, H, N, D): (B, count, N) bool.

    The r-th of n real tokens is in segment floor(r count / n), so lengths differ by at most one; pads are in no segment.
    With n <= count, a segment contains at most one token.
    """
    batch, _, length, _ = like.shape
    rank = torch.arange(length, device=like.device).expand(batch, length)
    total = torch.full_like(rank[:, :1], length)
    if key_padding_mask is not None:
        rank, total = key_padding_mask.cumsum(1) - 1, key_padding_mask.sum(1, keepdim=True)
    segment = rank * count // total.clamp(min=1)
    member = segment.unsqueeze(1) == torch.arange(count, device=like.device).unsqueeze(1)
    return member if key_padding_mask is None else member & key_padding_mask.unsqueeze(1)


def segment_means(x: Tensor, member: Tensor, is_even: bool = False) -> Tensor:
    """The mean of x (B, H, N, D) over each segment: (B, H, m, D); zero for empty ones. `is_even`: all have the same length."""
    if is_even:
        return x.unflatten(2, (member.shape[1], -1)).mean(3)
    sums = torch.einsum("bmn,bhnd->bhmd", member.to(x.dtype), x)
    return sums / member.sum(-1).clamp(min=1)[:, None, :, None]


def pinv(a: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse of square matrices by iteration; each starts at its own `A^T / (|A|_1 |A|_inf)`."""
    size = a.abs()
    z = a.mT / (size.sum(-2).amax(-1) * size.sum(-1).amax(-1))[..., None, None]
    shape, a, z = a.shape, a.reshape(-1, *a.shape[-2:]), z.reshape(-1, *a.shape[-2:])
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        inner = torch.baddbmm(15 * eye, az, 7 * eye - az, alpha=-1)
        z = z @ torch.baddbmm(13 * eye, az, inner, alpha=-1) / 4
    return z.view(shape)


def truncate_rank(a: Tensor, rank: int) -> Tensor:
    """The best least-squares approximation of matrices a (..., N, N) by matrices of `rank` < N."""
    return _Truncate.apply(a, rank)  # type: ignore[no-untyped-call]


class _Truncate(torch.autograd.Function):
    """With A = U S V^T and E = U^T dA V, the differential of the truncation is U X V^T, where for i kept and j dropped

        X_ij = s_i (s_i E_ij + s_j E_ji) / (s_i^2 - s_j^2),    X_ji = s_i (s_i E_ji + s_j E_ij) / (s_i^2 - s_j^2),

    X = E among the kept and 0 among the dropped. Unlike in the derivatives of U and V, equal values inside either set do no
    harm. The map from dA to U X V^T is its own adjoint, so it is also the backward pass. Where a kept and a dropped value are
    equal within the accuracy of the decomposition, the truncation has no derivative: those terms are left out. A matrix that is
    not finite has no decomposition: its truncation is NaN.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, rank: int) -> Tensor:
        is_finite = a.isfinite().all(-1).all(-1)[..., None, None]
        u, s, vt = torch.linalg.svd(torch.where(is_finite, a, 0))
        ctx.save_for_backward(a, u, s, vt)
        ctx.rank = rank
        return torch.where(is_finite, (u[..., :rank] * s[..., None, :rank]) @ vt[..., :rank, :], torch.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        a, u, s, vt = ctx.saved_tensors
        with torch.no_grad():
            found = _Truncate.differential(grad, u, s, vt, ctx.rank)
        return forbid_double_backward([found], [grad, a])[0], None

    @staticmethod
    def differential(grad: Tensor, u: Tensor, s: Tensor, vt: Tensor, rank: int) -> Tensor:
        e = u.mT @ grad @ vt.mT
        kept, dropped = s[..., :rank, None], s[..., None, rank:]
        apart = kept - dropped > s[..., :1, None] * s.shape[-1] * torch.finfo(s.dtype).eps  # (..., r, N - r)
        slope = torch.where(apart, kept / torch.where(apart, (kept - dropped) * (kept + dropped), 1), 0)
        right, below = e[..., :rank, rank:], e[..., rank:, :rank].mT
        x = torch.zeros_like(e)
        x[..., :rank, :rank] = e[..., :rank, :rank]
        x[..., :rank, rank:] = slope * (kept * right + dropped * below)
        x[..., rank:, :rank] = (slope * (kept * below + dropped * right)).mT
        return u @ x @ vt
