"""Softmax attention: every query attends to every key.

    o_i = sum_j softmax_j(s q_i . k_j + mask_ij) v_j,    s = 1/sqrt(D)

Vaswani et al., 2017. O(N M D) time. Runs on PyTorch's fused `scaled_dot_product_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from subquad.engines import dense
from subquad.engines.call import Call
from subquad.engines.state_spec import StateSpec
from subquad.engines.step import Step
from subquad.families.base import Info, Mechanism
from subquad.state import StateTensors

INFO = Info(
    name="softmax",
    family="exact",
    engine="dense",
    idea="every query weighs every key by the softmax of their scaled dot products",
    paper="Vaswani et al., 2017, Attention Is All You Need, arXiv:1706.03762",
    time="O(N M D)",
    memory="O(N D)",
    state="O(T D), the keys and values",
    state_grows=True,
    exact=True,
)


@dataclass(frozen=True, kw_only=True)
class Softmax(Mechanism):
    """Exact attention; no options."""

    info: ClassVar[Info] = INFO

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        return dense.attend(call)

    def step(self, call: Call) -> Step | None:
        return dense.prepare_step(call)

    def state_spec(self, call: Call) -> StateSpec:
        return dense.state_spec(call)
