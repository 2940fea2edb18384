"""JSON as typed values: the type that a file becomes is also the description of what the file may hold.

    parse(Results, json.loads(text))

walks through the type and the value together. Where they do not fit, it raises a `MisfitError` with the place and the rule:

    timings[3].rounds[0][1] must be a number from 1e-09 to 1e+09; got 0

A type is a dataclass or a TypedDict, whose required fields must all be there, and no unknown ones; a list, tuple or dict of
types; a union; a Literal; bool, int, float, str or None; Any for other JSON. `Annotated` adds a `Between` or a `Matching`.
Numbers are finite, except in a `Figure`. JSON has no NaN, so `dumps` writes the three special numbers as text, as Protocol
Buffers do. Text is made `printable`.
"""

from __future__ import annotations

import errno
import json
import math
import re
import reprlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

_ANY_FLOAT = object()
Figure = Annotated[float, _ANY_FLOAT]  # what was measured or computed, and may be NaN or infinite
Scalar = str | int | float | bool | None
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LARGEST = {int: 2**63 - 1, float: sys.float_info.max}
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}
_FINITE = {int: "an integer of at most 64 bits", float: "a finite number"}
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_DEEPEST = 16  # levels of JSON that no type describes


class MisfitError(ValueError):
    """JSON that does not fit its type."""


@dataclass(frozen=True)
class Between:
    """A number from `low` to `high`."""

    low: float
    high: float

    def check(self, value: Any, place: str) -> None:
        if not self.low <= value <= self.high:
            name = "an integer" if isinstance(value, int) else "a number"
            raise misfit(place, f"must be {name} from {self.low:g} to {self.high:g}", value)


@dataclass(frozen=True)
class Matching:
    """Text that matches `pattern`; `what` says what it is."""

    pattern: str
    what: str

    def check(self, value: Any, place: str) -> None:
        if not re.fullmatch(self.pattern, value):
            raise misfit(place, f"must be {self.what}", value)


def misfit(place: str, rule: str, got: Any) -> MisfitError:
    return MisfitError(f"{place or 'the file'} {rule}; got {reprlib.repr(got)}")


def printable(text: str) -> str:
    """`text` without characters that a terminal would act on, or that no file can hold."""
    return _UNPRINTABLE.sub("\ufffd", text)


def load(path: Path) -> Any:
    """The JSON in a file, of any type; OSError if it cannot be read."""
    if path.exists() and not path.is_file():  # reading a pipe would wait
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise MisfitError("it is nested too deeply") from None
    except ValueError as error:
        raise MisfitError(f"it is not valid JSON ({error})") from error


def dumps(value: Any, indent: int | None = None) -> str:
    """`value` as JSON."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:  # there is a special number
        return json.dumps(_without_special(value), allow_nan=False, indent=indent)


def _without_special(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_special(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_special(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def parse(kind: Any, value: Any, place: str = "") -> Any:
    """`value`, which came from JSON, as `kind`; `place` is where it is in the file."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _annotated(arguments, value, place)
    if origin in (Union, UnionType):
        return _union(arguments, value, place)
    if origin is Literal:
        if not isinstance(value, str) or value not in arguments:
            raise misfit(place, f"must be one of {', '.join(map(repr, arguments))}", value)
        return value
    if origin in (list, tuple):
        return _sequence(origin, arguments, value, place)
    if origin is dict:
        entries = _expect(dict, value, place)
        names, kinds = arguments
        return {parse(names, name, _key(place)): parse(kinds, entry, _entry(place, name)) for name, entry in entries.items()}
    if is_dataclass(kind) or is_typeddict(kind):
        return _object(kind, value, place)
    return _untyped(value, place) if kind is Any else _scalar(kind, value, place)


def _annotated(arguments: tuple[Any, ...], value: Any, place: str) -> Any:
    kind, *rules = arguments
    if rules == [_ANY_FLOAT]:
        value = _SPECIAL.get(value, value) if isinstance(value, str) else math.nan if value is None else value
        return value if isinstance(value, float) else _scalar(float, value, place)
    found = parse(kind, value, place)
    for rule in rules:
        rule.check(found, place)
    return found


def _union(kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) == 1:
        return parse(others[0], value, place)
    for kind in others:
        with suppress(MisfitError):
            return parse(kind, value, place)
    raise misfit(place, f"must be {' or '.join(_NAMES.get(kind, str(kind)) for kind in kinds)}", value)


def _sequence(origin: Any, kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    value = _expect(list, value, place)
    if origin is tuple and kinds[-1] is not Ellipsis:
        if len(value) != len(kinds):
            raise misfit(place, f"must be a list of {len(kinds)} entries", value)
        return tuple(parse(kind, entry, f"{place}[{i}]") for i, (kind, entry) in enumerate(zip(kinds, value, strict=True)))
    return origin(parse(kinds[0], entry, f"{place}[{i}]") for i, entry in enumerate(value))


def _object(kind: Any, value: Any, place: str) -> Any:
    known, required = _fields(kind)
    value = _expect(dict, value, place)
    for name in required:
        if name not in value:
            raise MisfitError(f"{_field(place, name)} is missing")
    for name in value:
        if name not in known:
            raise misfit(place, f"must have no entries other than {', '.join(known)}", name)
    found = {name: parse(known[name], entry, _field(place, name)) for name, entry in value.items()}
    return kind(**found)


@cache
def _fields(kind: Any) -> tuple[Mapping[str, Any], list[str]]:
    """The types of its fields, and the names of those that must be there."""
    hints = get_type_hints(kind, include_extras=True)
    if is_typeddict(kind):
        return hints, [name for name in hints if name in kind.__required_keys__]
    names = [field.name for field in fields(kind)]
    return {name: hints[name] for name in names}, names


def _scalar(kind: Any, value: Any, place: str) -> Any:
    """A bool is not a number; an integer may stand for a float."""
    fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not fits:
        raise misfit(place, f"must be {_NAMES[kind]}", value)
    if kind in _LARGEST and not -_LARGEST[kind] <= value <= _LARGEST[kind]:
        raise misfit(place, f"must be {_FINITE[kind]}", value)
    return printable(value) if kind is str else value


def _untyped(value: Any, place: str, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise MisfitError(f"{place} must be nested at most {_DEEPEST} levels deep")
    if isinstance(value, dict):
        return {
            _scalar(str, name, _key(place)): _untyped(entry, _entry(place, name), depth + 1) for name, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_untyped(entry, f"{place}[{i}]", depth + 1) for i, entry in enumerate(value)]
    return parse(Scalar, value, place)


def _expect(kind: type, value: Any, place: str) -> Any:
    fits = isinstance(value, (list, tuple) if kind is list else kind)
    if not fits:
        raise misfit(place, "must be a list" if kind is list else "must be an object", value)
    return value


def _field(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _key(place: str) -> str:
    return f"a key of {place or 'the file'}"


def _entry(place: str, name: Any) -> str:
    return f"{place}[{reprlib.repr(name)}]"
