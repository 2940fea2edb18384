"""Point 3: under is_causal the past does not depend on the future, exactly."""

from __future__ import annotations

import pytest
import torch

from subquad.testing.assertions import assert_close
from subquad.testing.cases import Case, inputs
from subquad.testing.contract.selection import Contract, requires


class Causality(Contract):
    """3. No gradient from the future, and no change in the past when the future changes or goes."""

    @requires(is_causal=True)
    @pytest.mark.parametrize("t", [0, 5, 62, 63, 64, 100])
    def test_gradient_from_the_future_is_zero(self, case: Case, t: int) -> None:
        x = inputs(130, grad=True)
        out = case.run(x, is_causal=True)
        query, key, value, hidden = torch.autograd.grad(out[:, :, t].sum(), [*x], allow_unused=True)
        for grad in (query, key, value):
            assert grad is None or (grad[:, :, t + 1 :] == 0).all()
        assert hidden is None or (hidden[:, t + 1 :] == 0).all()
        assert (value[:, :, : t + 1] != 0).any() or (hidden is not None and (hidden[:, : t + 1] != 0).any())

    @requires(is_causal=True)
    @pytest.mark.parametrize("magnitude", [1e-3, 10.0, 1e3, 1e6])
    @pytest.mark.parametrize("grad", [False, True])
    def test_changing_the_future_changes_nothing_before(self, case: Case, magnitude: float, grad: bool) -> None:
        x = inputs(130, grad=grad)
        before = case.run(x, is_causal=True)
        for t in (1, 40, 64, 129):
            future = inputs(130 - t, seed=7).map(lambda tensor: tensor * magnitude)
            changed = x.tokens(0, t).followed_by(future)
            assert_close(case.run(changed, is_causal=True)[:, :, :t], before[:, :, :t])

    @requires(is_causal=True)
    @torch.no_grad()
    def test_removing_the_future_changes_nothing_before(self, case: Case) -> None:
        x = inputs(200)
        whole = case.run(x, is_causal=True)
        for t in (1, 2, 63, 64, 65, 128, 199):
            assert_close(case.run(x.tokens(0, t), is_causal=True), whole[:, :, :t])
