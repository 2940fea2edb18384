"""One family of errors. Each message says the rule, what came, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

_PACKAGES = {  # of each extra
    "convert": "peft",
    "report": "altair vl-convert-python jinja2",
    "test": "pytest",
    "train": "datasets pillow pyarrow sacrebleu scikit-learn",
}


class SubquadError(Exception):
    """Everything that subquad refuses."""


class InputError(SubquadError, ValueError):
    """Tensors or arguments that do not fit together."""


class OptionError(SubquadError, TypeError, ValueError):
    """An option that a mechanism does not have, or a value it cannot take."""


class UnknownMethodError(SubquadError, LookupError):
    """A name that no mechanism has."""


class UnsupportedError(SubquadError, NotImplementedError):
    """A combination that the mechanism has no sound definition for."""


class StateError(SubquadError, ValueError):
    """A decode state that belongs to another method, shape or precision."""


class MissingExtraError(SubquadError, ImportError):
    """Something to install first: an extra that only a part of subquad needs."""


def closest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?` for the names nearest to `word`; a full stop if none is near."""
    near = get_close_matches(word.lower(), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


def load_extra(extra: str, what: str, *modules: str) -> list[Any]:
    """The modules, or one error that says which extra `what` needs."""
    try:
        return [import_module(module) for module in modules]
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{what} needs the extra subquad[{extra}]; {error.name} is not installed. "
            f"Install it: pip install {_PACKAGES[extra]}"
        ) from error
