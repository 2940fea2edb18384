"""One family of errors. Each message states the rule, what it got, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

_PACKAGES = {  # of the extras
    "convert": "peft",
    "report": "altair vl-convert-python jinja2",
    "test": "pytest",
    "train": "datasets pillow pyarrow sacrebleu scikit-learn",
}


class SubquadError(Exception):
    """The base class of all errors that subquad raises."""


class InputError(SubquadError, ValueError):
    """Tensors or arguments that do not fit together."""


class OptionError(SubquadError, TypeError, ValueError):
    """An option that a mechanism does not have, or an invalid value for one."""


class UnknownMethodError(SubquadError, LookupError):
    """A method name that is not registered."""


class UnsupportedError(SubquadError, NotImplementedError):
    """A call that the mechanism does not support, usually because it has no sound definition there."""


class StateError(SubquadError, ValueError):
    """A decode state that does not fit the call: another method, shape, precision or device."""


class OutOfMemoryError(SubquadError, MemoryError):
    """A compiled kernel could not get the memory that it works in."""


class MissingExtraError(SubquadError, ImportError):
    """An optional dependency is not installed."""


def closest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?` with the names most similar to `word`; a full stop if none is similar."""
    near = get_close_matches(word.lower(), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


def shown(value: object) -> str:
    """`value` as a message shows it: not all of what is very long, and never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # such as that of an integer with more than 4300 digits
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def shown_text(text: str) -> str:
    """Text of a file as a message shows it: without quotes, control characters escaped, not all of what is very long."""
    text = repr(text)[1:-1]
    return text if len(text) <= 200 else f"{text[:200]}..."


def first_line(error: BaseException) -> str:
    """The first line that an error of another library says, as a sentence."""
    said = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    line = next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
    return line if line.endswith(".") else f"{line}."


def load_extra(extra: str, what: str, *modules: str) -> list[Any]:
    """Import the modules; if one is missing, raise an error that names the extra that `what` needs."""
    try:
        return [import_module(module) for module in modules]
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{what} needs the extra subquad[{extra}]; {error.name} is not installed. "
            f"Install it: pip install {_PACKAGES[extra]}"
        ) from error
