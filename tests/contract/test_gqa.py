"""Contract 9: fewer key-value heads equal repeated ones, without the repeat."""

import pytest
import torch

from tests.harness import DIM, Largest, assert_close, every_case, inputs


@every_case
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("size", [7, 130])
def test_equals_reference(case, kv_heads, size):
    case.skip_unless(enable_gqa=True)
    x = inputs(size, heads=6, kv_heads=kv_heads, grad=True)
    for is_causal in case.directions:
        found, expected = (run(x, is_causal=is_causal) for run in (case.run, case.reference))
        assert_close(found, expected)
        grads = zip(*(torch.autograd.grad(out.square().sum(), x.key)[0] for out in (found, expected)), strict=True)
        for ours, theirs in grads:
            assert_close(ours, theirs)


@every_case
@torch.no_grad()
def test_does_not_repeat_keys_or_values(case):
    case.skip_unless(enable_gqa=True, cross=True)
    keys, heads = case.at_most(4000), 96
    x = inputs(1, keys, heads=heads, kv_heads=1, batch=1)
    module = case.module_for(x)
    with Largest() as largest:
        case.run(x, module)
    assert largest.numel < heads * keys * DIM / 2
