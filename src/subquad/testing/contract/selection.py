"""What the classes of the contract share: the mechanisms they run on, and which tests apply to which of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

import pytest
import torch

from subquad.families.base import Mechanism
from subquad.testing.cases import SIZES, Case

Test = TypeVar("Test", bound=Callable[..., None])
Condition = Callable[[Case], str]  # why a test does not apply to a case; empty if it does


def requires(*conditions: Condition, **needs: bool) -> Callable[[Test], Test]:
    """Run a test on the mechanisms that support `needs` and meet the conditions."""

    def mark(test: Test) -> Test:
        test.conditions = [lambda case: "; ".join(case.why_not(**needs)), *conditions]  # type: ignore[attr-defined]
        return test

    return mark


def usual_options_only(test: Test) -> Test:
    """Run a slow test on the first listed options of each mechanism alone."""
    test.has_usual_options_only = True  # type: ignore[attr-defined]
    return test


class Contract:
    """A part of the contract. Subclasses list the mechanisms, the usual options of each first.

    Tests that a mechanism does not take part in, since it refuses what they are about, are not generated for it; where none of
    the mechanisms does, one skipped test says why.
    """

    mechanisms: ClassVar[Sequence[Mechanism]] = ()
    sizes: ClassVar[Sequence[int]] = SIZES  # sequence lengths to compare with the reference at

    def has_usual_options(self, case: Case) -> bool:
        """Whether these options are the first listed of their mechanism."""
        return case.mechanism == next(m for m in self.mechanisms if type(m) is type(case.mechanism))

    @pytest.fixture(autouse=True)
    def _seeded_and_strict(self) -> Iterator[None]:
        """A fixed seed; and `torch.empty` returns NaN, so that what an engine forgets to write shows."""
        torch.manual_seed(0)
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(before)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", self.sizes)
        cases = [Case(mechanism) for mechanism in self.mechanisms]
        if not cases:
            raise pytest.UsageError(f"{type(self).__name__}.mechanisms must list the mechanisms to test; it is empty.")
        if getattr(metafunc.function, "has_usual_options_only", False):
            cases = [case for case in cases if self.has_usual_options(case)]
        reasons = {case: _why_not(metafunc.function, case) for case in cases}
        chosen = [pytest.param(case, id=case.name) for case, why_not in reasons.items() if not why_not]
        why = "; ".join(f"{case.name}: {reason}" for case, reason in reasons.items())
        metafunc.parametrize("case", chosen or [pytest.param(None, id="none", marks=pytest.mark.skip(why))])


def _why_not(test: Callable[..., None], case: Case) -> str:
    conditions: list[Condition] = getattr(test, "conditions", [])
    return "; ".join(filter(None, (condition(case) for condition in conditions)))
