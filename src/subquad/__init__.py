"""Attention whose cost does not grow with the square of the sequence length: every efficient mechanism behind one call."""

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from subquad.attention import MechanismModule, attention
from subquad.backend import Backend, backend
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
from subquad.registry import info, methods, register, why_not
from subquad.state import State

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Names whose modules need more than torch are imported when they are first used."""
    if name == "models":
        return import_module("subquad.models")
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'subquad' has no attribute {name!r}")


_LATER = {
    "advise": "subquad.bench",
    "convert": "subquad.conversion",
    "diagnose": "subquad.conversion",
    "load": "subquad.conversion",
    "revert": "subquad.conversion",
}

__all__ = [
    "RFA",
    "SVD",
    "T2R",
    "Attention",
    "Backend",
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
    "backend",
    "info",
    "methods",
    "register",
    "why_not",
]

# Where transformers' models are in use already, `from_pretrained` learns to load subquad's models now; otherwise when
# `subquad.models` is imported.
if "transformers.modeling_utils" in sys.modules:
    with suppress(ImportError):  # a transformers that is too old: the error comes when subquad.models is asked for
        import_module("subquad.models")
