"""One family of errors. Each message says the rule, what came, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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
