"""Attention whose cost does not grow with the square of the sequence length: every efficient mechanism behind one call."""

from importlib import import_module
from typing import Any

from subquad.attention import MechanismModule, attention
from subquad.errors import (
    InputError,
    MissingExtraError,
    OptionError,
    StateError,
    SubquadError,
    UnknownMethodError,
    UnsupportedError,
)
from subquad.families.base import Info, Mechanism
from subquad.layer import Attention
from subquad.mechanisms import (
    RFA,
    SVD,
    T2R,
    BigBird,
    Clustered,
    Efficient,
    Hedgehog,
    Hybrid,
    Induced,
    Linear,
    Linformer,
    Local,
    Longformer,
    Nystrom,
    Performer,
    Plain,
    Pooled,
    Reformer,
    Routing,
    Softmax,
    SparseFixed,
    SparseStrided,
    Taylor,
)
from subquad.pretrained import watch as _watch
from subquad.registry import info, methods, register, why_not
from subquad.state import State

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What loads more than torch loads when it is used."""
    if name == "models":
        return import_module("subquad.models")
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'subquad' has no attribute {name!r}")


_LATER = {
    "advise": "subquad.bench",
    "convert": "subquad.conversion",
    "diagnose": "subquad.conversion",
    "revert": "subquad.conversion",
}
_watch()

__all__ = [
    "RFA",
    "SVD",
    "T2R",
    "Attention",
    "BigBird",
    "Clustered",
    "Efficient",
    "Hedgehog",
    "Hybrid",
    "Induced",
    "Info",
    "InputError",
    "Linear",
    "Linformer",
    "Local",
    "Longformer",
    "Mechanism",
    "MechanismModule",
    "MissingExtraError",
    "Nystrom",
    "OptionError",
    "Performer",
    "Plain",
    "Pooled",
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
    "register",
    "why_not",
]
