"""Contract 3: under is_causal the past does not depend on the future, exactly."""

import pytest
import torch

from tests.harness import assert_close, every_case, inputs


@every_case
@pytest.mark.parametrize("t", [0, 5, 62, 63, 64, 100])
def test_gradient_from_the_future_is_zero(case, t):
    case.skip_unless(is_causal=True)
    x = inputs(130, grad=True)
    out = case.run(x, is_causal=True)
    query, key, value, hidden = torch.autograd.grad(out[:, :, t].sum(), [*x], allow_unused=True)
    for grad in (query, key, value):
        assert grad is None or (grad[:, :, t + 1 :] == 0).all()
    assert hidden is None or (hidden[:, t + 1 :] == 0).all()
    assert (value[:, :, : t + 1] != 0).any() or (hidden is not None and (hidden[:, : t + 1] != 0).any())


@every_case
@pytest.mark.parametrize("size", [1e-3, 10.0, 1e3, 1e6])
@pytest.mark.parametrize("grad", [False, True])
def test_changing_the_future_changes_nothing_before(case, size, grad):
    case.skip_unless(is_causal=True)
    x = inputs(130, grad=grad)
    before = case.run(x, is_causal=True)
    for t in (1, 40, 64, 129):
        future = inputs(130 - t, seed=7).map(lambda tensor: tensor * size)
        parts = zip(x.tokens(0, t), future, (2, 2, 2, 1), strict=True)
        changed = type(x)(*(torch.cat([past, new], dim=dim) for past, new, dim in parts))
        assert_close(case.run(changed, is_causal=True)[:, :, :t], before[:, :, :t])


@every_case
@torch.no_grad()
def test_a_nan_in_a_later_key_stays_there(case):
    case.skip_unless(is_causal=True)
    if case.info.engine not in ("kernelized", "hybrid"):
        pytest.skip("which kernel PyTorch takes decides")
    x = inputs(100)
    x.key[:, :, 50] = torch.nan
    assert case.run(x, is_causal=True)[:, :, :50].isfinite().all()


@every_case
@torch.no_grad()
def test_removing_the_future_changes_nothing_before(case):
    case.skip_unless(is_causal=True)
    x = inputs(200)
    whole = case.run(x, is_causal=True)
    for t in (1, 2, 63, 64, 65, 128, 199):
        assert_close(case.run(x.tokens(0, t), is_causal=True), whole[:, :, :t])
