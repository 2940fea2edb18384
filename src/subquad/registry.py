"""The mechanisms by name: what each supports, and why it refuses the rest.

Other packages add mechanisms with `register`, or declare their classes as entry points of the group `subquad.mechanisms`. Entry
points are loaded when the mechanisms are listed, or when an unknown name is used.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from subquad.errors import InputError, OptionError, UnknownMethodError, UnsupportedError, closest
from subquad.families.base import NEEDS, Info, Mechanism
from subquad.mechanisms import MECHANISMS

GROUP = "subquad.mechanisms"  # the entry points of other packages
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = ("all", "sdpa")  # on the command line: every method, and the baseline
_DEFAULTS: dict[str, Mechanism] = {}

MechanismClass = TypeVar("MechanismClass", bound=type[Mechanism])


def register(mechanism: MechanismClass) -> MechanismClass:
    """Add a mechanism under its name, to use wherever a built-in one can be used; works as a class decorator.

    Worker processes import the module that defines the class, so register it in that module.
    """
    if not (isinstance(mechanism, type) and issubclass(mechanism, Mechanism)):
        raise OptionError(f"register takes a subclass of subquad.Mechanism; got {mechanism!r}.")
    if not isinstance(getattr(mechanism, "info", None), Info):
        raise OptionError(f"{mechanism.__name__}.info must be a subquad.Info; got {getattr(mechanism, 'info', None)!r}.")
    name = mechanism.info.name
    if not getattr(mechanism.__dict__.get("__dataclass_params__"), "frozen", False):
        raise OptionError(f"{mechanism.__name__} must be a frozen dataclass: @dataclass(frozen=True, kw_only=True).")
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise OptionError(
            "the name of a mechanism must be made of lower-case letters, digits and underscores, and must not be "
            f"{' or '.join(_RESERVED)}; got {name!r}."
        )
    if unknown := [need for need in mechanism.info.refuses if need not in NEEDS]:
        raise OptionError(
            f"{name}.info.refuses has unknown requirements: {', '.join(unknown)}. Requirements: {', '.join(NEEDS)}."
        )
    if name in _DEFAULTS and type(_DEFAULTS[name]) is not mechanism:
        known = type(_DEFAULTS[name])
        raise OptionError(
            f"two mechanisms are called {name!r}: {known.__module__}.{known.__name__} and "
            f"{mechanism.__module__}.{mechanism.__name__}. Rename one of them."
        )
    try:
        _DEFAULTS[name] = mechanism()
    except TypeError as error:
        raise OptionError(f"{mechanism.__name__} must have a default for every option, and a run method: {error}.") from error
    return mechanism


for _class in MECHANISMS:
    register(_class)


@cache
def _load_plugins() -> None:
    """Register the mechanisms of installed packages."""
    for entry in entry_points(group=GROUP):
        _load_plugin(entry)


def _load_plugin(entry: EntryPoint) -> None:
    """Register one; if that fails, warn and leave it out, since a broken package must not hide the others."""
    try:
        register(entry.load())
    except Exception as error:
        warnings.warn(
            f"the mechanism {entry.name!r} of an installed package cannot be loaded and is left out: {entry.value}: {error}",
            stacklevel=2,
        )


def methods(**needs: bool) -> list[str]:
    """The names of the mechanisms that support `needs` with their default options: `methods(is_causal=True, decode=True)`."""
    required = _required(needs)
    _load_plugins()
    return [name for name, mechanism in _DEFAULTS.items() if not mechanism.reasons(required)]


def info(method: str | Mechanism) -> Info:
    """The record of a mechanism."""
    return resolve(method).info


def why_not(method: str | Mechanism, **needs: bool) -> list[str]:
    """Every reason why `method` does not support `needs`; empty if it does: `why_not("rfa", functional=True)`."""
    return [f"{NEEDS[need]}: {reason}" for need, reason in resolve(method).reasons(_required(needs)).items()]


def resolve(method: str | Mechanism) -> Mechanism:
    """The mechanism; for a name, the mechanism of that name with its default options."""
    if isinstance(method, Mechanism):
        return method
    if isinstance(method, str) and method not in _DEFAULTS:
        _load_plugins()
    if not isinstance(method, str):
        raise UnknownMethodError(
            f"method must be a name or a mechanism such as subquad.Linear(); got {method!r}. Names: {', '.join(_DEFAULTS)}."
        )
    if method not in _DEFAULTS:
        raise UnknownMethodError(
            f"no method is called {method!r}{closest(method, _DEFAULTS)} Methods: {', '.join(_DEFAULTS)}. "
            "If it comes from another package, install that package, or import the module that registers it."
        )
    return _DEFAULTS[method]


def require(mechanism: Mechanism, needs: Iterable[str]) -> None:
    """Raise an error with every reason, and the mechanisms that can, if `mechanism` does not support all `needs`."""
    needs = tuple(needs)
    reasons = mechanism.reasons(needs)
    if not reasons:
        return
    lines = "".join(f"\n  - {NEEDS[need]}: {reason}." for need, reason in reasons.items())
    able = [name for name, default in _DEFAULTS.items() if not default.reasons(needs)]
    able = [f"{name} with its default options" if name == mechanism.info.name else name for name in able]
    instead = f"Supported by: {', '.join(able)}." if able else "No mechanism supports all of that together."
    raise UnsupportedError(f"{mechanism.info.name} does not support this:{lines}\n{instead}")


def options_of(mechanism: Mechanism) -> dict[str, Any]:
    """All options of a mechanism, as values for JSON."""
    values = {f.name: getattr(mechanism, f.name) for f in fields(mechanism)}  # type: ignore[arg-type]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def with_options(method: str, options: dict[str, Any]) -> Mechanism:
    """The mechanism of that name with the options that `options_of` gave."""
    named = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return type(resolve(method))(**named)


def to_record(mechanism: Mechanism) -> dict[str, Any]:
    """The name and all options, as values for JSON. Files keep every option, so that new defaults do not change old models."""
    return {"name": mechanism.info.name, **options_of(mechanism)}


def from_record(record: dict[str, Any]) -> Mechanism:
    """The mechanism of a record that `to_record` made."""
    if "name" not in record:
        raise OptionError(f"the record of a mechanism must have a name beside its options; got {record!r}.")
    return with_options(record["name"], {name: value for name, value in record.items() if name != "name"})


def module_of(mechanism: Mechanism) -> str:
    """The module that a worker process imports to know this mechanism; an error if it is a script or a notebook."""
    module = type(mechanism).__module__
    if module == "__main__":
        raise InputError(
            f"{type(mechanism).__name__} must be defined in a module that worker processes can import; got one from a script "
            "or notebook. Move it to a file of its own and import it."
        )
    return module


def load_module(name: str) -> None:
    """In a worker process: import the module that defines a mechanism and registers it."""
    import_module(name)


def _required(needs: dict[str, bool]) -> tuple[str, ...]:
    for name, value in needs.items():
        if name not in NEEDS:
            raise InputError(f"no requirement is called {name!r}{closest(name, NEEDS)} Requirements: {', '.join(NEEDS)}.")
        if not isinstance(value, bool):
            raise InputError(f"{name} must be True (needed) or False (not needed); got {value!r}.")
    return tuple(name for name, value in needs.items() if value)
