"""Points 4, 5: what stands in pads never matters, nor which other sequences are in the batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from subquad.testing.assertions import assert_close
from subquad.testing.cases import Case, Inputs, inputs
from subquad.testing.contract.selection import Contract, requires

SIDES = {
    "right": [True] * 70 + [False] * 31,
    "left": [False] * 31 + [True] * 70,
    "holes": [i % 3 > 0 for i in range(101)],
}


def padded(x: Inputs, real: Tensor, fill: float) -> Inputs:
    """`x` with `fill` in the pads of keys, values and tokens."""
    pads = ~real
    return Inputs(
        x.query,
        x.key.masked_fill(pads[:, None, :, None], fill),
        x.value.masked_fill(pads[:, None, :, None], fill),
        x.hidden.masked_fill(pads[:, :, None], fill),
    )


class Padding(Contract):
    """4, 5. Pads and batch mates."""

    @requires(key_padding_mask=True)
    @pytest.mark.parametrize("side", SIDES)
    @torch.no_grad()
    def test_padded_equals_reference(self, case: Case, side: str) -> None:
        x, real = inputs(101), torch.tensor([SIDES[side], [True] * 101])
        for is_causal in case.directions:
            found, expected = (run(x, is_causal=is_causal, key_padding_mask=real) for run in (case.run, case.reference))
            assert_close(found, expected)

    @requires(key_padding_mask=True)
    @pytest.mark.parametrize("side", SIDES)
    @pytest.mark.parametrize("fill", [1e30, math.inf, math.nan])
    def test_pad_content_changes_no_bit(self, case: Case, side: str, fill: float) -> None:
        real = torch.tensor([SIDES[side], [True] * 101])
        for is_causal in case.directions:
            results = []
            for content in (0.0, fill):
                x = padded(inputs(101), real, content).map(Tensor.requires_grad_)
                out = case.run(x, is_causal=is_causal, key_padding_mask=real)
                grads = torch.autograd.grad(out.square().sum(), [*x], allow_unused=True)
                results.append([out, *(g for g in grads if g is not None)])
            for clean, dirty in zip(*results, strict=True):
                assert torch.equal(clean, dirty)

    @requires(key_padding_mask=True)
    @pytest.mark.parametrize("side", ["right", "left"])
    @torch.no_grad()
    def test_padded_equals_the_sequence_alone(self, case: Case, side: str) -> None:
        real = torch.tensor([SIDES[side]] * 2)
        x = inputs(70)
        pad = inputs(31, seed=3).map(lambda t: torch.full_like(t, math.nan))
        together = x.followed_by(pad) if side == "right" else pad.followed_by(x)
        for is_causal in case.directions:
            out = case.run(together, is_causal=is_causal, key_padding_mask=real)
            found = out[:, :, :70] if side == "right" else out[:, :, 31:]
            assert_close(found, case.run(x, is_causal=is_causal))

    @torch.no_grad()
    def test_batch_mates_do_not_matter(self, case: Case) -> None:
        x = inputs(90, batch=3)
        x.key[1] *= 20
        real = torch.tensor([[True] * 90, [True] * 50 + [False] * 40, [i % 2 > 0 for i in range(90)]])
        for is_causal in case.directions:
            for mask in [None] if case.why_not(key_padding_mask=True) else [None, real]:
                together = case.run(x, is_causal=is_causal, key_padding_mask=mask)
                for row in range(3):
                    one = slice(row, row + 1)
                    own = None if mask is None else mask[one]
                    alone = case.run(Inputs(*(t[one] for t in x)), is_causal=is_causal, key_padding_mask=own)
                    assert_close(alone, together[one])
