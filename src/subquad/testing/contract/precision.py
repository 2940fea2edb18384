"""Point 10: in low precision, at most twice the error of the plain reference in the same precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from subquad.testing.cases import Case, inputs
from subquad.testing.contract.selection import Contract, requires


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm())


class Precision(Contract):
    """10. Sums are kept in float32, whatever the inputs are in."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
    @torch.no_grad()
    def test_error_is_at_most_twice_the_references(self, case: Case, dtype: torch.dtype) -> None:
        module = case.build(dtype=torch.float32)
        for is_causal in case.directions:
            x = inputs(300, dtype=dtype)
            truth = case.reference(x.map(Tensor.double), module, is_causal=is_causal)
            out = case.run(x, module, is_causal=is_causal)
            assert out.dtype == dtype
            assert error(out, truth) <= 2 * error(case.reference(x, module, is_causal=is_causal), truth)

    @pytest.mark.parametrize("grad", [False, True])
    def test_output_has_the_precision_of_the_query(self, case: Case, grad: bool) -> None:
        x = inputs(70, dtype=torch.bfloat16, grad=grad)
        for is_causal in case.directions:
            assert case.run(x, case.build(dtype=torch.float32), is_causal=is_causal).dtype == torch.bfloat16

    @requires(decode=True)
    @torch.no_grad()
    def test_states_keep_float32(self, case: Case) -> None:
        """3,000 tokens in ten pieces: sums kept in bfloat16 would stop growing."""
        x = inputs(3000, dtype=torch.bfloat16, batch=1, heads=1)
        module = case.build(heads=1, dtype=torch.float32)
        truth = case.run(x.map(Tensor.double), copy.deepcopy(module).double(), is_causal=True)
        state = None
        for start in range(0, 3000, 300):
            out, state = case.run(x.tokens(start, start + 300), module, is_causal=True, state=state, return_state=True)
        rounded = truth[:, :, -300:].bfloat16()
        assert error(out, truth[:, :, -300:]) <= 2 * error(rounded, truth[:, :, -300:]) + 1e-6 * float(truth.norm())

    @torch.no_grad()
    def test_autocast_does_not_reach_the_sums(self, case: Case) -> None:
        module = case.build(dtype=torch.float32)
        x = inputs(100, dtype=torch.float32)
        for is_causal in case.directions:
            plain = case.run(x, module, is_causal=is_causal)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(case.run(x, module, is_causal=is_causal), plain)
