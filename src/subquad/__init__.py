"""Attention that does not grow with the square of the sequence: every efficient mechanism behind one call."""

from subquad.api import Attention, Mechanism, attention
from subquad.errors import (
    InputError,
    MissingExtraError,
    OptionError,
    StateError,
    SubquadError,
    UnknownMethodError,
    UnsupportedError,
)
from subquad.mechanisms import RFA, Config, Efficient, Info, Linear, Performer, Plain, Softmax, Taylor
from subquad.registry import info, methods, why_not
from subquad.state import State

__version__ = "0.1.0"

__all__ = [
    "RFA",
    "Attention",
    "Config",
    "Efficient",
    "Info",
    "InputError",
    "Linear",
    "Mechanism",
    "MissingExtraError",
    "OptionError",
    "Performer",
    "Plain",
    "Softmax",
    "State",
    "StateError",
    "SubquadError",
    "Taylor",
    "UnknownMethodError",
    "UnsupportedError",
    "__version__",
    "attention",
    "info",
    "methods",
    "why_not",
]
