"""Routing attention: tokens that are near the same centroid attend to each other.

    c(x) = argmax_c  x/|x| . mu_c        mu_c the centroids, of unit length, one set per head, for queries and keys alike

Keys are sorted by (centroid, position) and cut into chunks. A query attends to its own key, and to the keys with its centroid
in the chunk where it would be sorted and in the one before; when causal, to the last C earlier ones:

    o_i = sum_j softmax_j(s q_i . k_j) v_j    over these j

Roy et al., 2021. O(N (C + b) D) time for chunks of C tokens and b centroids. In training, centroids follow the tokens near them
by a moving average, mu <- decay mu + (1 - decay) mean, scaled back to unit length. In the published form every centroid selects
its nearest tokens, which depends on the future and leaves some tokens without a centroid; here every token selects its nearest
centroid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.bucketed import Rule
from subquad.engines.call import Call
from subquad.families.base import Info, Sizes
from subquad.families.bucketed import Bucketed, refuses
from subquad.masks import zero_pads
from subquad.ops.feature_map import unit_vectors
from subquad.ops.precision import compute_dtype, upcast

INFO = Info(
    name="routing",
    family="bucketed",
    engine="bucketed",
    idea="tokens near the same centroid attend to each other; centroids follow the tokens in training",
    paper="Roy et al., 2021, Efficient Content-Based Sparse Attention with Routing Transformers, arXiv:2003.05997",
    time="O(N ((C + b) D + log N)), chunks of C tokens, b centroids",
    memory="O(N (C + D)), without gradients for one head at a time",
    state="O(b C D), the last C tokens near each of b centroids",
    random="the initial values of the centroids",
    updates="the centroids, by a moving average of the tokens near them",
    refuses=refuses(),
)


@dataclass(frozen=True, kw_only=True)
class Routing(Bucketed):
    """Online k-means attention.

    Args:
        clusters: b, the number of centroids per head.
        chunk: C, the number of tokens in a chunk.
        decay: of the moving average; below 1. Every forward pass in train mode moves the centroids, except those with a decode
            state. A forward pass that activation checkpointing repeats uses the centroids of the first one, and moves none.
        seed: the seed of the initial centroids.
    """

    info: ClassVar[Info] = INFO
    clusters: int = 64
    chunk: int = 64
    decay: float = 0.999
    seed: int = 0

    def __post_init__(self) -> None:
        self._require_count("chunk")
        self._require_rows("clusters")
        self._require_positive("decay")
        if self.decay >= 1:
            self._refuse("decay", "must be below 1, or the centroids would never move")
        self._require_seed()

    def buffers(self, sizes: Sizes) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = sizes.kv_heads, self.clusters, sizes.head_dim
        return {"centroids": unit_vectors(torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu"))}

    def rule(self, call: Call) -> Rule:
        return Rule(buckets=self.clusters, rounds=1, chunk=self.chunk, shared=False, is_causal=call.is_causal)

    @torch.no_grad()
    def bucket_of(self, x: Tensor, call: Call) -> Tensor:
        groups = x.shape[1] // call.key.shape[1]
        tokens = zero_pads(upcast(x), call.key_padding_mask).unflatten(1, (-1, groups)).flatten(2, 3)
        nearest = tokens @ self._centroids(call).mT  # (B, K, G n, b); the length of a token does not change its maximum
        return nearest.argmax(-1).unflatten(2, (groups, x.shape[2])).flatten(1, 2).unsqueeze(2)  # (B, h, 1, n)

    def update(self, call: Call) -> dict[str, Tensor]:
        centroids = self._centroids(call)
        tokens = torch.cat([self._tokens(x, call) for x in (call.query, call.key)], dim=2)  # (B, K, m, D)
        nearest = F.one_hot((tokens @ centroids.mT).argmax(-1), self.clusters).to(tokens.dtype)
        if call.key_padding_mask is not None:
            groups = 1 + call.query.shape[1] // call.key.shape[1]
            nearest = nearest * call.key_padding_mask.repeat(1, groups)[:, None, :, None]
        total, count = (nearest.mT @ tokens).sum(0), nearest.sum((0, 2)).unsqueeze(-1)  # (K, b, D), (K, b, 1)
        moved = unit_vectors(self.decay * centroids + (1 - self.decay) * total / count.clamp(min=1))
        return {"centroids": torch.where(count > 0, moved, centroids)}

    def _tokens(self, x: Tensor, call: Call) -> Tensor:
        """Queries or keys (B, h, n, D) of unit length, by key-value head: (B, K, G n, D)."""
        x = zero_pads(upcast(x), call.key_padding_mask)
        return unit_vectors(x).unflatten(1, (call.key.shape[1], -1)).flatten(2, 3)

    def _centroids(self, call: Call) -> Tensor:
        return call.weights["centroids"].to(compute_dtype(call.query))
