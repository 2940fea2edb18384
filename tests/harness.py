"""Every registered mechanism, with its default options and its variants, ready to run beside its reference."""

import pytest

from subquad.mechanisms import MECHANISMS
from subquad.testing import (
    DIM,
    HEADS,
    ROUNDING,
    VALUE_DIM,
    WIDTH,
    Case,
    Inputs,
    Largest,
    assert_close,
    inputs,
    relative_error,
)
from tests.options import small, variants

DEFAULTS = [Case(cls(**small(cls.info.name))) for cls in MECHANISMS]
CASES = [Case(cls(**{**small(cls.info.name), **options})) for cls in MECHANISMS for options in ({}, *variants(cls.info.name))]


def every_case(**needs):
    """Parametrizes a test over all cases that support `needs`."""
    return _each([case for case in CASES if not case.why_not(**needs)])


def every_default(**needs):
    """Parametrizes a test over all mechanisms that support `needs`, with their default options made small."""
    return _each([case for case in DEFAULTS if not case.why_not(**needs)])


def _each(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


__all__ = [
    "CASES",
    "DEFAULTS",
    "DIM",
    "HEADS",
    "ROUNDING",
    "VALUE_DIM",
    "WIDTH",
    "Case",
    "Inputs",
    "Largest",
    "assert_close",
    "every_case",
    "every_default",
    "inputs",
    "relative_error",
]
