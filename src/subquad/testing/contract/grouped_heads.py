"""Point 9: fewer key-value heads equal repeated ones, without the repeat in memory."""

from __future__ import annotations

import pytest
import torch

from subquad.testing.assertions import assert_close
from subquad.testing.cases import DIM, Case, Largest, inputs
from subquad.testing.contract.selection import Contract, requires


class GroupedHeads(Contract):
    """9. Grouped-query attention."""

    @requires(enable_gqa=True)
    @pytest.mark.parametrize("kv_heads", [1, 2, 3])
    @pytest.mark.parametrize("length", [7, 130])
    def test_fewer_key_value_heads_equal_reference(self, case: Case, kv_heads: int, length: int) -> None:
        x = inputs(length, heads=6, kv_heads=kv_heads, grad=True)
        for is_causal in case.directions:
            found, expected = (run(x, is_causal=is_causal) for run in (case.run, case.reference))
            assert_close(found, expected)
            ours, theirs = (torch.autograd.grad(out.square().sum(), x.key)[0] for out in (found, expected))
            for sequence in range(len(ours)):
                assert_close(ours[sequence], theirs[sequence])

    @requires(enable_gqa=True, cross=True)
    @torch.no_grad()
    def test_does_not_repeat_keys_or_values(self, case: Case) -> None:
        keys, heads = case.at_most(4000), 96
        x = inputs(1, keys, heads=heads, kv_heads=1, batch=1)
        module = case.module_for(x)
        with Largest() as largest:
            case.run(x, module)
        assert largest.numel < heads * keys * DIM / 2
