"""What the kernelized mechanisms share: they state a kernel, the engine does the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from subquad.engines import kernelized
from subquad.engines.call import Call
from subquad.engines.kernelized import Kernel
from subquad.families.base import Mechanism
from subquad.state import StateTensors

TIME = "O((N + M) m D)"
MEMORY = "O(m D)"
STATE = "O(m D), constant"

_NO_WEIGHTS: Mapping[str, str] = {
    "attn_mask": "the sum over keys is shared by all queries, so no pair of a query and a key can be masked alone",
    "dropout_p": "no attention weights exist that could be dropped; put dropout on the output instead",
}


def refuses(**more: str) -> Mapping[str, str]:
    """What no kernelized mechanism can do, and `more`."""
    return {**_NO_WEIGHTS, **more}


class Kernelized(Mechanism):
    """A mechanism on the kernelized engine."""

    @abstractmethod
    def kernel(self, call: Call) -> Kernel:
        """The feature maps and the normalizer, for these inputs."""

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        return kernelized.attend(
            call.query,
            call.key,
            call.value,
            self.kernel(call),
            is_causal=call.is_causal,
            key_padding_mask=call.key_padding_mask,
            past=call.past,
            return_state=call.return_state,
        )
