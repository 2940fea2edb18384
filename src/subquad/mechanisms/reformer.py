"""Reformer: tokens with the same hash attend to each other.

    h(x) = argmax [xR; -xR],    R random, D x b/2, one for every round and head

Tokens are sorted by (hash, position) and cut into chunks. A query attends to the tokens with its hash in its own chunk and the
one before; with several rounds, to the union over all of them. Queries and keys are the same vectors, and keys have unit
length:

    o_i = sum_j softmax_j(q_i . q_j/|q_j|) v_j    over these j != i; over i itself only if there are no others

There is no 1/sqrt(D): the authors give keys the length sqrt(D) and then divide by it. Kitaev et al., 2020. O(N R C D) time for
R rounds and chunks of C tokens, and O(R N log N) for sorting.

The borders of chunks move when later tokens join a bucket, so in the published causal form later tokens decide which keys a
query attends to. Here a causal query attends to the last C earlier tokens of its bucket. With `shared_qk=False` queries and
keys are hashed separately, scores are those of softmax attention, and a query also attends to its own key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subquad.engines.bucketed import Rule
from subquad.engines.call import Call
from subquad.families.base import Info, Sizes
from subquad.families.bucketed import Bucketed, refuses
from subquad.masks import zero_pads
from subquad.ops.feature_map import unit_vectors
from subquad.ops.precision import upcast

INFO = Info(
    name="reformer",
    family="bucketed",
    engine="bucketed",
    idea="tokens that random rotations hash to the same bucket attend to each other, in a few rounds",
    paper="Kitaev et al., 2020, Reformer: The Efficient Transformer, arXiv:2001.04451",
    time="O(N R (C D + log N)), R rounds, chunks of C tokens",
    memory="O(N R (C + D)), without gradients for one head at a time",
    state="O(R b C D), the last C tokens of each of b buckets in R rounds",
    random="the rotations",
    refuses=refuses(),
)


@dataclass(frozen=True, kw_only=True)
class Reformer(Bucketed):
    """Locality-sensitive hashing attention.

    Args:
        buckets: b, the number of hash values; even.
        chunk: C, the number of tokens in a chunk.
        rounds: R, the number of hashes; more rounds miss fewer keys.
        shared_qk: queries and keys are the same vectors, as published: pass one tensor as both. False: they differ.
        seed: the seed of the rotations.
    """

    info: ClassVar[Info] = INFO
    buckets: int = 64
    chunk: int = 64
    rounds: int = 4
    shared_qk: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self._require_count("chunk")
        self._require_rows("buckets", "rounds")
        if self.buckets % 2:
            self._refuse("buckets", "must be even, since every direction has an opposite")
        self._require_flag("shared_qk")
        self._require_seed()

    @property
    def shares_query_and_key(self) -> bool:
        return self.shared_qk

    @property
    def refuses(self) -> Mapping[str, str]:
        if not self.shared_qk:
            return self.info.refuses
        return {
            **self.info.refuses,
            "enable_gqa": "queries and keys are the same vectors, so they have the same heads; use shared_qk=False",
        }

    def buffers(self, sizes: Sizes) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = sizes.kv_heads, self.rounds, self.buckets // 2, sizes.head_dim
        return {"rotations": torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")}

    def rule(self, call: Call) -> Rule:
        return Rule(buckets=self.buckets, rounds=self.rounds, chunk=self.chunk, shared=self.shared_qk, is_causal=call.is_causal)

    @torch.no_grad()
    def bucket_of(self, x: Tensor, call: Call) -> Tensor:
        x = zero_pads(upcast(x), call.key_padding_mask)
        rotations = call.weights["rotations"].to(x.dtype)  # (K, R, b/2, D)
        heads, length = x.shape[1:3]
        x = x.unflatten(1, (rotations.shape[0], -1)).flatten(2, 3)  # (B, K, G n, D)
        u = (x @ rotations.flatten(1, 2).mT).unflatten(-1, rotations.shape[1:3])  # (B, K, G n, R, b/2)
        found = u.abs().argmax(-1, keepdim=True)
        found = torch.where(u.gather(-1, found) < 0, found + self.buckets // 2, found).squeeze(-1)  # (B, K, G n, R)
        return found.unflatten(2, (heads // rotations.shape[0], length)).flatten(1, 2).mT

    def scored(self, call: Call) -> Call:
        if not self.shared_qk:
            return call
        key = unit_vectors(zero_pads(upcast(call.key), call.key_padding_mask))
        return replace(call, key=key, scale=1.0 if call.scale is None else call.scale)
