"""What the sparse patterns share: they state a layout, the engine does the rest."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from subquad.engines import block_sparse
from subquad.engines.block_sparse import Layout
from subquad.engines.call import Call
from subquad.families.base import Info, Mechanism
from subquad.state import StateTensors

# Two sets of keys in every head, or each in half of the heads.
Heads = Literal["merged", "split"]
HEADS: tuple[Heads, ...] = ("merged", "split")

_FIXED_PAIRS: Mapping[str, str] = {
    "cross": "its pattern relates positions of one sequence",
    "attn_mask": "a mask of all pairs costs the square of the length that the pattern saves; use key_padding_mask for pads",
    "dropout_p": "the fused kernel keeps no attention weights that could be dropped; put dropout on the output instead",
}


def refuses(**more: str) -> Mapping[str, str]:
    """What no sparse pattern can do, and `more`."""
    return {**_FIXED_PAIRS, **more}


class Pattern(Mechanism):
    """A mechanism on the block-sparse engine."""

    @abstractmethod
    def layout(self, call: Call) -> Layout:
        """Who sees whom, in this call."""

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        return block_sparse.attend(
            call.query,
            call.key,
            call.value,
            self.layout(call),
            key_padding_mask=call.key_padding_mask,
            scale=call.scale,
            seen=call.seen,
            past=call.past,
            return_state=call.return_state,
        )


def halves(heads: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first half of the heads, one more where their number is odd, and the others."""
    half = (heads + 1) // 2
    return tuple(range(half)), tuple(range(half, heads))


def real_lengths(call: Call) -> Tensor:
    """How many real tokens each row has: (B,), or (1,) where there are no pads."""
    if call.key_padding_mask is None:
        return torch.full((1,), call.key.shape[2], device=call.key.device)
    return call.key_padding_mask.sum(1)


def default_stride(length: int) -> int:
    """The square root of the length, rounded."""
    return max(1, round(math.sqrt(length)))


def no_stride(info: Info) -> Mapping[str, str]:
    """What a pattern whose stride is the root of the length refuses."""
    why = "the default stride is the root of the length, which {} change; set stride"
    return {**info.refuses, "is_causal": why.format("later tokens"), "key_padding_mask": why.format("pads")}
