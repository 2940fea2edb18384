"""Induced attention: learned points attend to the sequence, and the queries attend to the points.

    h = softmax(s I k^T),    o_i = sum_p softmax_p(s q_i . (h k)_p) (h v)_p,    I (m, D) learned for each head,  s = 1/sqrt(D)

Lee et al., 2019. O((N + M) m D) time. With fewer key-value heads than query heads, the points belong to the key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.low_rank import attend
from subquad.families.base import Info, Mechanism, Sizes
from subquad.masks import zero_pads
from subquad.ops.precision import upcast
from subquad.state import StateTensors

INFO = Info(
    name="induced",
    family="low_rank",
    engine="low_rank",
    idea="a few learned points attend to all keys, and every query attends to the results",
    paper="Lee et al., 2019, Set Transformer, arXiv:1810.00825",
    replaces_softmax=True,
    time="O((N + M) m D)",
    memory="O((N + M) D)",
    parameters="the points",
    refuses={
        "is_causal": "its points attend to the whole sequence, including the future",
        "decode": "its points attend to the whole sequence, so a new token changes all results",
        "attn_mask": "queries attend to keys through the points, so no single pair can be masked",
        "dropout_p": "queries attend to keys through the points, so no weight of a single pair can be dropped",
        "functional": "its points are learned; use subquad.Attention(dim, heads, method='induced') or "
        "Induced().build(heads=..., head_dim=...)",
    },
)


@dataclass(frozen=True, kw_only=True)
class Induced(Mechanism):
    """Attention through learned points.

    Args:
        points: m, the number of points per key-value head.
    """

    info: ClassVar[Info] = INFO
    points: int = 64

    def __post_init__(self) -> None:
        self._require_rows("points")

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"points": torch.randn(sizes.kv_heads, self.points, sizes.head_dim)}  # of the size of keys

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        mask = call.key_padding_mask
        query, key, value = upcast(call.query), *(upcast(zero_pads(x, mask)) for x in (call.key, call.value))
        points = call.weights["points"].to(key.dtype).expand(key.shape[0], -1, -1, -1)  # (B, K, m, D)
        hk, hv = (attend(points, key, x, mask, call.scale) for x in (key, value))  # (B, K, m, D), (B, K, m, Dv)
        return attend(query, hk, hv, None, call.scale).to(call.query.dtype), None
