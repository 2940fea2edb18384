"""Hedgehog: a learned map whose features are softmaxes, so that a few keys can get most of the weight, as in softmax attention.

    o_i = phi(q_i) sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)),    phi(x) = [softmax(x W), softmax(-x W)]

over the D channels of x W, so m = 2D. W (D, D) is learned, one for each query head and one for the keys of each key-value head;
it starts as the identity. Zhang et al., 2024. O((N + M) D Dv) time, a (2D, Dv) state. There is no 1/sqrt(D): x is q or k itself
or, with a `scale` c, sqrt(c) times it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subquad.families.base import Info
from subquad.families.feature_maps import HedgehogMap, LearnedKernelized, LearnedMap, needs_module
from subquad.families.kernelized import MEMORY, STATE, TIME, refuses

INFO = Info(
    name="hedgehog",
    family="kernelized",
    engine="kernelized",
    idea="softmaxes over the channels of learned projections as features, trained to be as spiky as softmax attention",
    paper="Zhang et al., 2024, The Hedgehog & the Porcupine, arXiv:2402.04347",
    replaces_softmax=True,
    time=TIME,
    memory=MEMORY,
    state=STATE,
    parameters="the projections of queries and keys",
    refuses=refuses(functional=needs_module("hedgehog", "Hedgehog", "its maps")),
)


@dataclass(frozen=True, kw_only=True)
class Hedgehog(LearnedKernelized):
    """Attention with Hedgehog's features; no options."""

    info: ClassVar[Info] = INFO

    @property
    def learned_map(self) -> LearnedMap:
        return HedgehogMap()
