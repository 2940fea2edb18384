"""What the kernelized mechanisms share: each defines a rule with its feature map, and the engine does the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from subquad.engines import kernelized
from subquad.engines.call import Call
from subquad.engines.state_spec import StateSpec
from subquad.engines.step import Step
from subquad.families.base import Mechanism
from subquad.ops.kernelized import KernelizedRule
from subquad.state import StateTensors

TIME = "O((N + M) m D)"
MEMORY = "O(m D)"
STATE = "O(m D), constant"

_NO_WEIGHTS: Mapping[str, str] = {
    "attn_mask": "all queries share one sum over the keys, so no single query-key pair can be masked",
    "dropout_p": "it computes no attention weights that could be dropped; apply dropout to the output instead",
}


def refuses(**more: str) -> Mapping[str, str]:
    """What no kernelized mechanism supports, and `more`."""
    return {**_NO_WEIGHTS, **more}


class Kernelized(Mechanism):
    """A mechanism on the kernelized engine."""

    @abstractmethod
    def rule(self, call: Call) -> KernelizedRule:
        """The feature map and the normalizer for this call."""

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        return kernelized.attend(call, self.rule(call))

    def state_spec(self, call: Call) -> StateSpec:
        return kernelized.state_spec(call, self.rule(call))

    def step(self, call: Call) -> Step | None:
        return kernelized.prepare_step(call, self.rule(call))
