"""Which mechanisms there are, what each can do, and why it can't do the rest."""

from __future__ import annotations

from collections.abc import Iterable

from subquad.errors import InputError, UnknownMethodError, UnsupportedError, closest
from subquad.mechanisms import MECHANISMS, NEEDS, Config, Info


def _table(classes: Iterable[type[Config]]) -> dict[str, Config]:
    table: dict[str, Config] = {}
    for cls in classes:
        name = cls.info.name
        if name in table:
            raise ValueError(f"two mechanisms are called {name!r}: {type(table[name]).__name__} and {cls.__name__}")
        table[name] = cls()
    return table


_DEFAULTS = _table(MECHANISMS)


def methods(**needs: bool) -> list[str]:
    """The names of all mechanisms that meet `needs` with their default options: `methods(is_causal=True, decode=True)`."""
    asked = _asked(needs)
    return [name for name, config in _DEFAULTS.items() if not config.reasons(asked)]


def info(method: str | Config) -> Info:
    """The record of one mechanism."""
    return resolve(method).info


def why_not(method: str | Config, **needs: bool) -> list[str]:
    """Every reason why `method` cannot meet `needs`; empty if it can: `why_not("rfa", functional=True)`."""
    return [f"{NEEDS[need]}: {reason}" for need, reason in resolve(method).reasons(_asked(needs)).items()]


def resolve(method: str | Config) -> Config:
    """The options that a name or a config object stands for."""
    if isinstance(method, Config):
        return method
    if not isinstance(method, str):
        raise UnknownMethodError(
            f"method is a name or a config object such as subquad.Linear(); got {method!r}. Names: {', '.join(_DEFAULTS)}."
        )
    if method not in _DEFAULTS:
        raise UnknownMethodError(f"no method is called {method!r}{closest(method, _DEFAULTS)} Methods: {', '.join(_DEFAULTS)}.")
    return _DEFAULTS[method]


def require(method: Config, needs: Iterable[str]) -> None:
    """Refuse, with every reason and the mechanisms that can, if `method` cannot meet all `needs`."""
    needs = tuple(needs)
    reasons = method.reasons(needs)
    if not reasons:
        return
    lines = "".join(f"\n  - {NEEDS[need]}: {reason}." for need, reason in reasons.items())
    able = [name for name, config in _DEFAULTS.items() if not config.reasons(needs)]
    able = [f"{name} with its default options" if name == method.info.name else name for name in able]
    instead = f"These can: {', '.join(able)}." if able else "No mechanism can do all of that together."
    raise UnsupportedError(f"{method.info.name} cannot do this:{lines}\n{instead}")


def _asked(needs: dict[str, bool]) -> tuple[str, ...]:
    for name, value in needs.items():
        if name not in NEEDS:
            raise InputError(f"a mechanism cannot be asked for {name!r}{closest(name, NEEDS)} Ask for: {', '.join(NEEDS)}.")
        if not isinstance(value, bool):
            raise InputError(f"{name} is True (needed) or False (not needed); got {value!r}.")
    return tuple(name for name, value in needs.items() if value)
