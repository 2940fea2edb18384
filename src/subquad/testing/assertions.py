"""Comparison of results, relative to the largest expected value.

`subquad.testing` imports this module first: it needs pytest, and asks it to show the values of failed assertions in the others.
"""

from __future__ import annotations

from torch import Tensor

from subquad.errors import load_extra

[_pytest] = load_extra("test", "subquad.testing", "pytest")
_pytest.register_assert_rewrite("subquad.testing.cases", "subquad.testing.contract")

# float64 has 2e-16; signed denominators (trig, rfa) lose some digits.
ROUNDING = 1e-9


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value; NaN if either has one."""
    if found.shape != expected.shape:
        raise AssertionError(f"the shapes differ: found {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if not expected.numel():
        return 0.0
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item()


def assert_close(found: Tensor, expected: Tensor, rounding: float = ROUNDING) -> None:
    """Fails if shapes differ, or values by more than `rounding`, relative to the largest."""
    error = relative_error(found, expected)
    if not error < rounding:
        raise AssertionError(f"the values differ: relative error {error:.2e}, at most {rounding:.0e} expected")
