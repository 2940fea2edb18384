"""Hybrid attention: softmax inside a window, a learned feature map beyond it, under one denominator.

    o_i = sum_j w_ij v_j / sum_j w_ij,    w_ij = e^(s q_i . k_j)           where |i - j| <= window,  s = 1/sqrt(D)
                                          w_ij = g phi(q_i) . phi(k_j)     elsewhere

and j <= i when causal. phi is the feature map of Hedgehog, T2R or linear attention (see `families/feature_maps.py`); g > 0 is
learned for each query head, as its logarithm. `window` counts as in `local`: a causal query attends exactly to its own key and
to the `window` keys before it. Positions count real tokens only; the queries of pads give 0. phi reads q and k themselves or,
with a `scale` c, sqrt(c) times them, and then s = c.

Zhang et al., 2024 (LoLCATs). O(N (window + m) D) time; the state is the window and an (m, Dv) sum. To see what the window alone
contributes, compare with `local` at the same window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from subquad.engines import hybrid
from subquad.engines.call import Call
from subquad.engines.hybrid_step import prepare_step
from subquad.engines.state_spec import StateSpec
from subquad.engines.step import Step
from subquad.families.base import Info, Mechanism, Sizes
from subquad.families.feature_maps import (
    T2R_FEATURES,
    HedgehogMap,
    LearnedMap,
    LinearMap,
    T2RMap,
    needs_module,
    require_positive_scale,
)
from subquad.ops.hybrid import HybridRule
from subquad.state import StateTensors

MapName = Literal["hedgehog", "t2r", "linear"]

INFO = Info(
    name="hybrid",
    family="hybrid",
    engine="hybrid",
    idea="softmax over the keys within a window, a learned feature map for all keys beyond it, under one denominator",
    paper="Zhang et al., 2024, LoLCATs: On Low-Rank Linearizing of Large Language Models, arXiv:2410.10254",
    replaces_softmax=True,
    time="O(N (w + m) D), w keys to each side",
    memory="O(N m)",
    state="O((w + m) D), constant: the window and the sums over the keys before it",
    parameters="the weight of the far keys; the projections of the feature map",
    refuses={
        "cross": "its window relates positions of one sequence",
        "attn_mask": "all queries share one sum over the far keys, so no single query-key pair can be masked",
        "dropout_p": "far keys have no attention weights that could be dropped; apply dropout to the output instead",
        "functional": needs_module("hybrid", "Hybrid", "its feature map and the weight of the far keys"),
    },
)


@dataclass(frozen=True, kw_only=True)
class Hybrid(Mechanism):
    """Softmax within a window and a feature map beyond it.

    Args:
        window: how many tokens on each side a query attends to exactly; when causal, on the left only.
        map: the feature map for the keys beyond the window.
        features: m, for map="t2r"; None for 32.
    """

    info: ClassVar[Info] = INFO
    window: int = 64
    map: MapName = "hedgehog"
    features: int | None = None

    def __post_init__(self) -> None:
        self._require_whole("window")
        self._require_choice("map", get_args(MapName))
        if self.features is not None:
            self._require_rows("features")
            if self.map != "t2r":
                self._refuse("features", f"is only for map='t2r', but map is {self.map!r}; leave features out")

    @property
    def learned_map(self) -> LearnedMap:
        maps: Mapping[str, LearnedMap] = {"hedgehog": HedgehogMap(), "t2r": T2RMap(self.features or T2R_FEATURES)}
        return maps.get(self.map, LinearMap())

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"log_mix": torch.zeros(sizes.heads), **self.learned_map.parameters(sizes)}

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        require_positive_scale(call.scale, self.info.name)
        return hybrid.attend(call, self._stated(call))

    def state_spec(self, call: Call) -> StateSpec:
        return hybrid.state_spec(call, self._stated(call))

    def step(self, call: Call) -> Step | None:
        require_positive_scale(call.scale, self.info.name)
        return prepare_step(call, self._stated(call))

    def _stated(self, call: Call) -> hybrid.HybridCall:
        learned = self.learned_map
        return hybrid.HybridCall(
            rule=HybridRule(learned.kind, self.window, call.softmax_scale, call.is_causal),
            project=lambda x, side: learned.project(x, call, side),
            channels=learned.channels(call.query.shape[-1]),
            log_mix=call.weights["log_mix"],
        )
