"""Contract 10: in low precision, at most twice the error of the plain reference in the same precision."""

import copy

import pytest
import torch

from tests.harness import every_case, inputs


def error(found, truth):
    return (found.double() - truth).norm()


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@torch.no_grad()
def test_error_is_at_most_twice_the_references(case, dtype):
    module = case.build(dtype=torch.float32)
    for is_causal in case.directions:
        x = inputs(300, dtype=dtype)
        truth = case.reference(x.map(torch.Tensor.double), module, is_causal=is_causal)
        out = case.run(x, module, is_causal=is_causal)
        assert out.dtype == dtype
        assert error(out, truth) <= 2 * error(case.reference(x, module, is_causal=is_causal), truth)


@every_case
@pytest.mark.parametrize("grad", [False, True])
def test_output_has_the_precision_of_the_query(case, grad):
    x = inputs(70, dtype=torch.bfloat16, grad=grad)
    for is_causal in case.directions:
        assert case.run(x, case.build(dtype=torch.float32), is_causal=is_causal).dtype == torch.bfloat16


@every_case
@torch.no_grad()
def test_float32(case):
    module = case.build(dtype=torch.float32)
    for is_causal in case.directions:
        x = inputs(300, dtype=torch.float32)
        truth = case.reference(x.map(torch.Tensor.double), module, is_causal=is_causal)
        found = case.run(x, module, is_causal=is_causal)
        assert error(found, truth) <= 2 * error(case.reference(x, module, is_causal=is_causal), truth)


@every_case
@torch.no_grad()
def test_states_keep_float32(case):
    """3,000 tokens in ten pieces: sums kept in bf16 would stop growing."""
    case.skip_unless(decode=True)
    x = inputs(3000, dtype=torch.bfloat16, batch=1, heads=1)
    module = case.build(heads=1, dtype=torch.float32)
    truth = case.run(x.map(torch.Tensor.double), copy.deepcopy(module).double(), is_causal=True)
    state = None
    for start in range(0, 3000, 300):
        out, state = case.run(x.tokens(start, start + 300), module, is_causal=True, state=state, return_state=True)
    rounded = truth[:, :, -300:].bfloat16()
    assert error(out, truth[:, :, -300:]) <= 2 * error(rounded, truth[:, :, -300:]) + 1e-6 * truth.norm()


@every_case
@torch.no_grad()
def test_autocast_does_not_reach_the_sums(case):
    module = case.build(dtype=torch.float32)
    x = inputs(100, dtype=torch.float32)
    for is_causal in case.directions:
        plain = case.run(x, module, is_causal=is_causal)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(case.run(x, module, is_causal=is_causal), plain)
