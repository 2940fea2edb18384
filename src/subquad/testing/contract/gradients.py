"""Point 2: gradients of query, key, value, tokens and every parameter. Points 1 and 2 again at the usual sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subquad.testing.assertions import ROUNDING, assert_close
from subquad.testing.cases import Case, Inputs, inputs
from subquad.testing.contract.selection import Contract


def gradients(case: Case, x: Inputs, *, is_causal: bool) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradients of inputs and parameters, of the mechanism and of its reference."""
    wrt = [*x, *case.module_for(x).parameters()]
    shape = (*x.query.shape[:3], x.value.shape[3])
    target = torch.randn(shape, dtype=torch.float64).to(x.query.dtype)
    found, expected = (
        torch.autograd.grad((run(x, is_causal=is_causal) * target).sum(), wrt, allow_unused=True)
        for run in (case.run, case.reference)
    )
    return list(found), list(expected)


def assert_gradients_close(found: list[Tensor | None], expected: list[Tensor | None], rounding: float = ROUNDING) -> None:
    largest = max(float(grad.abs().max()) for grad in expected if grad is not None)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        if theirs.abs().max() < rounding * largest:  # zero but for rounding, as that of a bias on all keys
            assert ours.abs().max() < rounding * largest
        else:
            assert_close(ours, theirs, rounding)


class Gradients(Contract):
    """2. Numerically right on small sizes, equal to the reference's on larger ones."""

    def test_gradcheck(self, case: Case) -> None:
        module = case.build()
        names = [name for name, _ in module.named_parameters()]
        for is_causal in case.directions:
            x = inputs(4, batch=1, grad=True)

            def run(
                query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, *parameters: Tensor, is_causal: bool = is_causal
            ) -> Tensor:
                x = Inputs(query, key, value, hidden)
                weights = dict(zip(names, parameters, strict=True))
                out: Tensor = case.run(
                    x, lambda *a, **k: torch.func.functional_call(module, weights, a, k), is_causal=is_causal
                )
                return out

            parameters = [p.detach().clone().requires_grad_() for p in module.parameters()]
            assert torch.autograd.gradcheck(run, (*x, *parameters))

    @pytest.mark.parametrize("length", [65, 150])
    def test_gradients_equal_reference(self, case: Case, length: int) -> None:
        for is_causal in case.directions:
            assert_gradients_close(*gradients(case, inputs(length, grad=True), is_causal=is_causal))

    def test_gradients_after_inference(self, case: Case) -> None:
        """Nothing that a call in inference mode leaves behind stops a later one from being trained."""
        length = 43  # of no other test
        case.module_for(inputs(length))  # its parameters are normal tensors
        for is_causal in case.directions:
            run = case.run if case.why_not(functional=True) else case.function
            with torch.inference_mode():
                run(inputs(length), is_causal=is_causal)
            x = inputs(length, grad=True)
            torch.autograd.grad(run(x, is_causal=is_causal).sum(), [*x], allow_unused=True)


class UsualSizes(Contract):
    """1, 2. With 16 channels, which fill whole vectors: compiled kernels read and write them in place, without a copy."""

    @torch.no_grad()
    def test_16_channels_equal_reference(self, case: Case) -> None:
        x = usual_inputs()
        for is_causal in case.directions:
            assert_close(case.run(x, is_causal=is_causal), case.reference(x, is_causal=is_causal))

    def test_gradients_of_16_channels_equal_reference(self, case: Case) -> None:
        for is_causal in case.directions:
            assert_gradients_close(*gradients(case, usual_inputs().map(Tensor.requires_grad_), is_causal=is_causal))


def usual_inputs() -> Inputs:
    """4 heads, 128 tokens, 16 channels; tokens before heads in memory, as projections leave them."""
    x = inputs(128, heads=4, dim=16, value_dim=16)
    query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x.query, x.key, x.value))
    return Inputs(query, key, value, x.hidden)
