"""What the sparse mechanisms share: each defines a layout, and the block-sparse engine computes it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch import Tensor

from subquad.engines import block_sparse
from subquad.engines.block_sparse import Layout
from subquad.engines.block_sparse.decoding import prepare_step
from subquad.engines.call import Call
from subquad.engines.state_spec import StateSpec
from subquad.engines.step import Step
from subquad.families.base import Info, Mechanism
from subquad.state import StateTensors

# Both sets of keys in every head, or one set in each half of the heads.
Heads = Literal["merged", "split"]
HEADS: tuple[Heads, ...] = ("merged", "split")

_FIXED_PAIRS: Mapping[str, str] = {
    "cross": "its pattern relates positions of one sequence",
    "attn_mask": "a mask of all pairs has the quadratic cost that the pattern avoids; use key_padding_mask for pads",
    "dropout_p": "its fused kernel stores no attention weights to drop; apply dropout to the output instead",
}


def refuses(**more: str) -> Mapping[str, str]:
    """The reasons of every sparse mechanism, and `more`."""
    return {**_FIXED_PAIRS, **more}


class SparseMechanism(Mechanism):
    """A mechanism on the block-sparse engine."""

    @abstractmethod
    def layout(self, call: Call) -> Layout:
        """Which keys each query sees in this call."""

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        return block_sparse.attend(call, self.layout(call))

    def state_spec(self, call: Call) -> StateSpec:
        return block_sparse.state_spec(call, self.layout(call))

    @property
    def layout_period(self) -> int | None:
        """After how many tokens of a decoded sequence the layout of the next token changes; None: never."""
        return None

    def step(self, call: Call) -> Step | None:
        assert call.state is not None
        before = replace(call.state, tensors={})  # keeps no memory

        def layout_at(seen: int) -> Layout:
            return self.layout(replace(call, state=replace(before, length=seen)))

        return prepare_step(call, layout_at, self.layout_period)


def halves(heads: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first half of the heads, rounded up, and the second."""
    half = (heads + 1) // 2
    return tuple(range(half)), tuple(range(half, heads))


def without_stride(info: Info) -> Mapping[str, str]:
    """What a mechanism refuses when its stride is the square root of the length."""
    why = "the default stride is the square root of the length, which {} change; set stride"
    return {**info.refuses, "is_causal": why.format("later tokens"), "key_padding_mask": why.format("pads")}
