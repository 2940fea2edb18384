"""A NaN in a real token shows: the compiled kernels and their PyTorch fallbacks return it in the same places."""

import pytest
import torch

from subquad.ops import dispatch
from tests.engines.test_native import needs_compiled
from tests.harness import CASES, inputs
from tests.kernels import has_kernels

with_kernels = pytest.mark.parametrize(
    "case", [case for case in CASES if has_kernels(case.mechanism)], ids=lambda case: case.name
)
TOKEN = 40


def rows_with_nan(case, x, is_causal):
    return case.run(x, is_causal=is_causal).isnan().any(-1)


def spoiled(case, where):
    x = inputs(97)
    if where == "query" and case.mechanism.shares_query_and_key:
        where = "key"
    getattr(x, where)[0, 1, TOKEN, 2] = torch.nan
    return x


@needs_compiled
@with_kernels
@pytest.mark.parametrize("where", ["query", "key"])
@torch.no_grad()
def test_in_a_query_or_a_key(case, where):
    x = spoiled(case, where)
    for is_causal in case.directions:
        found = rows_with_nan(case, x, is_causal)
        with dispatch.disabled():
            expected = rows_with_nan(case, x, is_causal)
        assert found[0, 1, TOKEN]
        assert torch.equal(found, expected)


@needs_compiled
@with_kernels
@torch.no_grad()
def test_in_a_value(case):
    """It may reach more rows than those that attend to the token, since 0 times NaN is NaN."""
    x, one, none = spoiled(case, "value"), inputs(97), inputs(97)
    none.value.zero_()
    one.value.zero_()[0, 1, TOKEN] = 1
    for is_causal in case.directions:
        difference = case.run(one, is_causal=is_causal) - case.run(none, is_causal=is_causal)
        sees = difference.abs().amax(-1) > 1e-9 * difference.abs().max()
        found = rows_with_nan(case, x, is_causal)
        with dispatch.disabled():
            expected = rows_with_nan(case, x, is_causal)
        assert sees.any()
        assert found[sees].all()
        assert expected[sees].all()
