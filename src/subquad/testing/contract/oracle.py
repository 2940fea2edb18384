"""Points 1, 6, 7: equal to the reference, at any length; zeros where there is nothing to attend to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from subquad.testing.assertions import assert_close
from subquad.testing.cases import HEADS, VALUE_DIM, Case, inputs
from subquad.testing.contract.selection import Contract, requires

# Of each other and of the chunks inside the engines, one less, the same, one more.
CROSS_SIZES = [(1, 300), (2, 1), (7, 65), (63, 127), (64, 2), (65, 64), (127, 7), (300, 63)]
MASK_SHAPES = [(), (70,), (70, 70), (1, 70), (70, 1), (1, 1, 70, 70), (2, 1, 70, 70), (2, 3, 1, 70)]


class Oracle(Contract):
    """1. The output equals the reference's."""

    @torch.no_grad()
    def test_equals_reference(self, case: Case, size: int) -> None:
        x = inputs(size)
        for is_causal in case.directions:
            assert_close(case.run(x, is_causal=is_causal), case.reference(x, is_causal=is_causal))

    @requires(cross=True)
    @pytest.mark.parametrize(("queries", "keys"), CROSS_SIZES)
    @torch.no_grad()
    def test_cross_equals_reference(self, case: Case, queries: int, keys: int) -> None:
        x = inputs(queries, keys)
        assert_close(case.run(x), case.reference(x))


class OracleOptions(Contract):
    """1. The same with a scale and with masks."""

    @requires(scale=True)
    @torch.no_grad()
    def test_scale_equals_reference(self, case: Case) -> None:
        x = inputs(65)
        for is_causal in case.directions:
            assert_close(case.run(x, is_causal=is_causal, scale=0.3), case.reference(x, is_causal=is_causal, scale=0.3))

    @requires(attn_mask=True)
    @pytest.mark.parametrize("shape", MASK_SHAPES)
    @pytest.mark.parametrize("kind", ["bool", "float"])
    @torch.no_grad()
    def test_attn_mask_equals_reference(self, case: Case, shape: tuple[int, ...], kind: str) -> None:
        x = inputs(70)
        real = torch.rand(2, 70) < 0.8
        mask = torch.rand(shape) < 0.5 if kind == "bool" else torch.randn(shape, dtype=torch.float64)
        for is_causal in case.directions:
            for padding in (None, real):
                options: dict[str, Any] = {"is_causal": is_causal, "attn_mask": mask, "key_padding_mask": padding}
                assert_close(case.run(x, **options), case.reference(x, **options))


class Lengths(Contract):
    """6, 7. No tokens, no keys, nothing but pads."""

    def test_no_tokens(self, case: Case) -> None:
        for is_causal in case.directions:
            assert case.run(inputs(0), is_causal=is_causal).shape == (2, HEADS, 0, VALUE_DIM)

    @requires(decode=True)
    def test_a_state_of_no_tokens(self, case: Case) -> None:
        out, state = case.run(inputs(0), is_causal=True, return_state=True)
        x = inputs(9)
        assert out.shape == (2, HEADS, 0, VALUE_DIM)
        assert_close(case.run(x, is_causal=True, state=state), case.run(x, is_causal=True))

    def test_no_tokens_keep_the_graph(self, case: Case) -> None:
        for is_causal in case.directions:
            x = inputs(0, grad=True)
            case.run(x, is_causal=is_causal).sum().backward()
            assert any(t.grad is not None for t in x)

    def test_empty_batch(self, case: Case) -> None:
        for is_causal in case.directions:
            assert case.run(inputs(5, batch=0), is_causal=is_causal).shape == (0, HEADS, 5, VALUE_DIM)

    @requires(cross=True)
    def test_no_keys_give_zeros(self, case: Case) -> None:
        out = case.run(inputs(5, 0))
        assert out.shape == (2, HEADS, 5, VALUE_DIM)
        assert (out == 0).all()

    @requires(key_padding_mask=True)
    @pytest.mark.parametrize("length", [9, 70])
    def test_nothing_to_attend_to_gives_zeros_and_finite_gradients(self, case: Case, length: int) -> None:
        real = torch.ones(2, length, dtype=torch.bool)
        real[0] = False
        real[1, :4] = False
        for is_causal in case.directions:
            x = inputs(length, grad=True)
            out = case.run(x, is_causal=is_causal, key_padding_mask=real)
            assert (out[0] == 0).all()
            assert not is_causal or (out[1, :, :4] == 0).all()
            assert (out[1, :, 4:] != 0).any()
            wrt = [*x, *case.build().parameters()]
            for grad in torch.autograd.grad(out.sum(), wrt, allow_unused=True):
                assert grad is None or grad.isfinite().all()
