"""Which mechanisms there are, what each can do, and why it cannot do the rest.

Other packages add mechanisms with `register`, or declare their classes as entry points of the group `subquad.mechanisms`. Those
are loaded when an unknown name is asked for, or all names are listed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from subquad.errors import InputError, OptionError, UnknownMethodError, UnsupportedError, closest
from subquad.families.base import NEEDS, Info, Mechanism
from subquad.mechanisms import MECHANISMS

GROUP = "subquad.mechanisms"  # of entry points
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_DEFAULTS: dict[str, Mechanism] = {}

MechanismClass = TypeVar("MechanismClass", bound=type[Mechanism])


def register(mechanism: MechanismClass) -> MechanismClass:
    """Make a mechanism known by its name, everywhere a built-in one is; usable as a class decorator.

    Worker processes import the module that the class is defined in, so define it in a module that registers it.
    """
    if not (isinstance(mechanism, type) and issubclass(mechanism, Mechanism)):
        raise OptionError(f"register takes a subclass of subquad.Mechanism; got {mechanism!r}.")
    if not isinstance(getattr(mechanism, "info", None), Info):
        raise OptionError(f"{mechanism.__name__}.info must be a subquad.Info; got {getattr(mechanism, 'info', None)!r}.")
    name = mechanism.info.name
    if not getattr(mechanism.__dict__.get("__dataclass_params__"), "frozen", False):
        raise OptionError(f"{mechanism.__name__} must be a frozen dataclass: @dataclass(frozen=True, kw_only=True).")
    if not _NAME.fullmatch(name):
        raise OptionError(f"the name of a mechanism has lower-case letters, digits and underscores; got {name!r}.")
    if unknown := [need for need in mechanism.info.refuses if need not in NEEDS]:
        raise OptionError(f"{name} refuses needs that do not exist: {', '.join(unknown)}. Needs: {', '.join(NEEDS)}.")
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
    """Register what installed packages announce; one that does not load is left out, with a warning."""
    for entry in entry_points(group=GROUP):
        try:
            register(entry.load())
        except Exception as error:  # noqa: PERF203 - one broken package must not hide the others
            warnings.warn(
                f"the mechanism {entry.name!r} of an installed package does not load and is left out: {entry.value}: {error}",
                stacklevel=2,
            )


def methods(**needs: bool) -> list[str]:
    """The names of all mechanisms that meet `needs` with their default options: `methods(is_causal=True, decode=True)`."""
    required = _required(needs)
    _load_plugins()
    return [name for name, mechanism in _DEFAULTS.items() if not mechanism.reasons(required)]


def info(method: str | Mechanism) -> Info:
    """The record of one mechanism."""
    return resolve(method).info


def why_not(method: str | Mechanism, **needs: bool) -> list[str]:
    """Every reason why `method` cannot meet `needs`; empty if it can: `why_not("rfa", functional=True)`."""
    return [f"{NEEDS[need]}: {reason}" for need, reason in resolve(method).reasons(_required(needs)).items()]


def resolve(method: str | Mechanism) -> Mechanism:
    """The mechanism itself, or the one of that name with its default options."""
    if isinstance(method, Mechanism):
        return method
    if isinstance(method, str) and method not in _DEFAULTS:
        _load_plugins()
    if not isinstance(method, str):
        raise UnknownMethodError(
            f"method must be a name or a mechanism such as subquad.Linear(); got {method!r}. Names: {', '.join(_DEFAULTS)}."
        )
    if method not in _DEFAULTS:
        raise UnknownMethodError(f"no method is called {method!r}{closest(method, _DEFAULTS)} Methods: {', '.join(_DEFAULTS)}.")
    return _DEFAULTS[method]


def require(mechanism: Mechanism, needs: Iterable[str]) -> None:
    """Refuse, with every reason and the mechanisms that can, if `mechanism` cannot meet all `needs`."""
    needs = tuple(needs)
    reasons = mechanism.reasons(needs)
    if not reasons:
        return
    lines = "".join(f"\n  - {NEEDS[need]}: {reason}." for need, reason in reasons.items())
    able = [name for name, default in _DEFAULTS.items() if not default.reasons(needs)]
    able = [f"{name} with its default options" if name == mechanism.info.name else name for name in able]
    instead = f"These can: {', '.join(able)}." if able else "No mechanism supports all of that together."
    raise UnsupportedError(f"{mechanism.info.name} does not support this:{lines}\n{instead}")


def options_of(mechanism: Mechanism) -> dict[str, Any]:
    """All options of a mechanism, as JSON has them."""
    values = {f.name: getattr(mechanism, f.name) for f in fields(mechanism)}  # type: ignore[arg-type]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def with_options(method: str, options: dict[str, Any]) -> Mechanism:
    """The mechanism of that name with the options that `options_of` gave."""
    named = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return type(resolve(method))(**named)


def to_record(mechanism: Mechanism) -> dict[str, Any]:
    """The name and all options, as JSON has them: saved files hold every option, so that later defaults change nothing."""
    return {"name": mechanism.info.name, **options_of(mechanism)}


def from_record(record: dict[str, Any]) -> Mechanism:
    """The mechanism that `to_record` wrote down."""
    if "name" not in record:
        raise OptionError(f"a mechanism written as a record has a name beside its options; got {record!r}.")
    return with_options(record["name"], {name: value for name, value in record.items() if name != "name"})


def module_of(mechanism: Mechanism) -> str:
    """The module that another process imports to know this mechanism; refused if there is none."""
    module = type(mechanism).__module__
    if module == "__main__":
        raise InputError(
            f"worker processes import mechanisms by module, and {type(mechanism).__name__} is defined in a script or notebook. "
            "Move it to a module of its own."
        )
    return module


def load_module(name: str) -> None:
    """In a worker process: import the module that defines and registers a mechanism."""
    import_module(name)


def _required(needs: dict[str, bool]) -> tuple[str, ...]:
    for name, value in needs.items():
        if name not in NEEDS:
            raise InputError(f"there is no need called {name!r}{closest(name, NEEDS)} Needs: {', '.join(NEEDS)}.")
        if not isinstance(value, bool):
            raise InputError(f"{name} must be True (needed) or False (not needed); got {value!r}.")
    return tuple(name for name, value in needs.items() if value)
