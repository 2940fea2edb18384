"""Attention that does not grow with the square of the sequence: every efficient mechanism behind one call."""

from subquad.api import Attention, Mechanism, attention
from subquad.errors import InputError, OptionError, StateError, SubquadError, UnknownMethodError, UnsupportedError
from subquad.mechanisms import (
    RFA,
    SVD,
    BigBird,
    Clustered,
    Config,
    Efficient,
    Induced,
    Info,
    Linear,
    Linformer,
    Local,
    Longformer,
    Nystrom,
    Performer,
    Plain,
    Reformer,
    Routing,
    Softmax,
    SparseFixed,
    SparseStrided,
    Taylor,
)
from subquad.registry import info, methods, why_not
from subquad.state import State

__version__ = "0.1.0"

__all__ = [
    "RFA",
    "SVD",
    "Attention",
    "BigBird",
    "Clustered",
    "Config",
    "Efficient",
    "Induced",
    "Info",
    "InputError",
    "Linear",
    "Linformer",
    "Local",
    "Longformer",
    "Mechanism",
    "Nystrom",
    "OptionError",
    "Performer",
    "Plain",
    "Reformer",
    "Routing",
    "Softmax",
    "SparseFixed",
    "SparseStrided",
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
