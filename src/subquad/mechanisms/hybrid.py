"""Hybrid attention: softmax inside a window, a learned feature map beyond it, under one denominator.

    o_i = sum_j w_ij v_j / sum_j w_ij,    w_ij = e^(s q_i . k_j)           where |i - j| <= window,  s = 1/sqrt(D)
                                          w_ij = g phi(q_i) . phi(k_j)     elsewhere

and j <= i when causal. phi is Hedgehog's, T2R's or that of linear attention (see `feature_maps`); g > 0 is learned for each
query head, as its logarithm. `window` counts as in `local`: a causal query sees its own key and `window` before it as they are.
Positions count real tokens only; the queries of pads give 0. phi reads q and k as they are or, given a `scale` c, sqrt(c) times
them, and then s = c.

Zhang et al., 2024 (LoLCATs). O(N (window + m) D) time; a state of the window and an (m, Dv) sum. How much of a result the
window alone gives, `local` with the same window says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from subquad.engines import hybrid
from subquad.engines.call import Call
from subquad.families.base import Info, Mechanism, Sizes
from subquad.families.feature_maps import FEATURES, FeatureMap, HedgehogMap, LinearMap, T2RMap, functional, project
from subquad.state import StateTensors

MapName = Literal["hedgehog", "t2r", "linear"]

INFO = Info(
    name="hybrid",
    family="hybrid",
    engine="hybrid",
    idea="softmax over the keys within a window, a learned feature map for all beyond it, under one denominator",
    paper="Zhang et al., 2024, LoLCATs: On Low-Rank Linearizing of Large Language Models, arXiv:2410.10254",
    replaces_softmax=True,
    time="O(N (w + m) D), w keys to each side",
    memory="O(N m)",
    state="O((w + m) D), constant: the window and the sums of what lies before it",
    parameters="how much the far keys count; the projections of the map",
    refuses={
        "cross": "its window relates positions of one sequence",
        "attn_mask": "far keys are summed once for all queries, so no pair of a query and a key can be masked alone",
        "dropout_p": "far keys are summed without attention weights that could be dropped; put dropout on the output instead",
        "functional": functional("hybrid", "Hybrid", "its map and how much it counts"),
    },
)


@dataclass(frozen=True, kw_only=True)
class Hybrid(Mechanism):
    """A window and a feature map.

    Args:
        window: how many tokens to each side a query sees as they are; when causal, to the left only.
        map: the features of what lies beyond.
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
            self._require_count("features")
            if self.map != "t2r":
                self._refuse("features", f"belongs to map='t2r', and map is {self.map!r}: leave features out")

    @property
    def feature_map(self) -> FeatureMap:
        maps: Mapping[str, FeatureMap] = {"hedgehog": HedgehogMap(), "t2r": T2RMap(self.features or FEATURES)}
        return maps.get(self.map, LinearMap())

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"log_mix": torch.zeros(sizes.heads), **self.feature_map.parameters(sizes)}

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        phi, head_dim = self.feature_map.phi, call.query.shape[-1]
        kernel = hybrid.Kernel(
            query=lambda x: phi(project(x, call, "query", self.info.name)),
            key=lambda x: phi(project(x, call, "key", self.info.name)),
            features=self.feature_map.features(head_dim),
            log_mix=call.weights["log_mix"],
            scale=head_dim**-0.5 if call.scale is None else call.scale,
            window=self.window,
        )
        return hybrid.attend(
            call.query,
            call.key,
            call.value,
            kernel,
            is_causal=call.is_causal,
            key_padding_mask=call.key_padding_mask,
            past=call.past,
            return_state=call.return_state,
        )
