"""Truncated attention: the best approximation of the softmax matrix by a matrix of a given rank.

    o = A_r v,    A = softmax(s q k^T) = U S V^T,  A_r = U_r S_r V_r^T the r largest singular values,  s = 1/sqrt(D)

An oracle for comparisons: no other matrix of rank r is closer to A in the least-squares sense (Eckart and Young, 1936). It
computes A and its decomposition in float64, in O(N^3) time and O(N^2) memory: slower than softmax itself. Pads are neither rows
nor columns of A, so `key_padding_mask` applies to queries and keys alike, and the output of a pad is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.low_rank import truncate_rank
from subquad.families.base import Info, Mechanism
from subquad.masks import zero_pads
from subquad.state import StateTensors

INFO = Info(
    name="svd",
    family="low_rank",
    engine="low_rank",
    idea="the best rank-r approximation of the softmax matrix: an oracle of cubic cost, which bounds every rank-r method",
    paper="Eckart and Young, 1936, The Approximation of One Matrix by Another of Lower Rank, doi:10.1007/BF02288367",
    time="O(N^3)",
    memory="O(N^2)",
    is_oracle=True,
    refuses={
        "is_causal": "truncating the rank fills the upper triangle, so the past would depend on the future",
        "decode": "a new token changes all singular vectors",
        "cross": "pads are left out of the matrix, and only in self-attention does key_padding_mask mark the pads of queries",
        "attn_mask": "truncating the rank gives weight to masked pairs",
        "dropout_p": "it is an oracle for comparisons, not for training",
    },
)


@dataclass(frozen=True, kw_only=True)
class SVD(Mechanism):
    """The best rank-r approximation of exact attention.

    Args:
        rank: r; for sequences of at most r tokens the result is exact.
    """

    info: ClassVar[Info] = INFO
    rank: int = 64

    def __post_init__(self) -> None:
        self._require_count("rank")

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        mask = call.key_padding_mask
        query, key, value = (zero_pads(x, mask).double() for x in (call.query, call.key, call.value))
        weights = _weights(query, key, mask, key.shape[-1] ** -0.5 if call.scale is None else call.scale)
        if self.rank < query.shape[2]:
            low = truncate_rank(weights, self.rank)
            # A row with at most r real tokens has no more than r singular values: nothing is truncated.
            weights = low if mask is None else torch.where((mask.sum(1) <= self.rank)[:, None, None, None], weights, low)
        out = _grouped(weights, value).to(call.query.dtype)
        return out if mask is None else out.masked_fill(
            ~mask[:, None, :, None], 0
        ), None  # singular vectors have rounding in pads


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The softmax matrix (B, H, N, N), with zeros in the rows and columns of pads."""
    scores = _grouped(query, key.mT) * scale
    if mask is None:
        return scores.softmax(-1)
    real = mask[:, None, :, None] & mask[:, None, None, :]
    left_out = ~mask & mask.any(1, keepdim=True)  # no infinity less infinity where all are pads
    scores = scores.masked_fill(left_out[:, None, None, :], -math.inf)
    return scores.softmax(-1).masked_fill(~real, 0)


def _grouped(x: Tensor, y: Tensor) -> Tensor:
    """x (B, H, N, C) @ y (B, K, C, D), without repeating y for the query heads that share it."""
    (_, heads, rows, _), kv_heads = x.shape, y.shape[1]
    folded = x.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)  # (B, K, G N, C)
    return (folded @ y).unflatten(2, (heads // kv_heads, rows)).flatten(1, 2)
