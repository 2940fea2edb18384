"""The field `method` of a model's config: what it may be, by layer and in JSON.

    "linear"                                 the same in all layers
    subquad.BigBird(block=32)                with options
    ["local", "linear", "softmax"]           one entry per layer
    "linear, softmax every 4th layer"        layers 4, 8, 12, ... differ

A saved config holds every option of each mechanism, so that later defaults change no saved model.
"""

from __future__ import annotations

import re
from typing import Any

from subquad.errors import OptionError
from subquad.families.base import Mechanism
from subquad.registry import from_record, resolve, to_record

_EVERY = re.compile(r"\s*(?P<most>\w+)\s*,\s*(?P<other>\w+) every (?P<n>[0-9]{1,9})(?:st|nd|rd|th) layer\s*")


def from_json(method: Any) -> Any:
    """`method` with records of JSON turned into mechanisms; anything else is left alone."""
    if isinstance(method, (list, tuple)):
        return [_mechanism(entry) for entry in method]
    return _mechanism(method)


def _mechanism(entry: Any) -> Any:
    return from_record(entry) if isinstance(entry, dict) else entry


def to_json(method: Any, layers: int) -> Any:
    """`method` as JSON: a record of the name and all options for each mechanism."""
    if method is None:
        return None
    if isinstance(method, (list, tuple)) or _phrase(method):
        return [to_json(entry, layers) for entry in by_layer(method, layers, "method")]
    return to_record(resolve(method))


def by_layer(method: Any, layers: int, field: str) -> list[Mechanism]:
    """The mechanism of each of `layers` layers."""
    if isinstance(method, (list, tuple)):
        if len(method) != layers:
            raise OptionError(
                f"{field} as a list must have one entry per layer, so {layers}; got {len(method)}. "
                'For a pattern write, for example, "linear, softmax every 4th layer".'
            )
        return [resolve(from_json(entry)) for entry in method]
    if phrase := _phrase(method):
        step = int(phrase["n"])
        if not 1 <= step <= layers:
            raise OptionError(f"{field}={method!r} must have a step from 1 to the number of layers, {layers}; got {step}.")
        most, other = resolve(phrase["most"]), resolve(phrase["other"])
        return [other if layer % step == 0 else most for layer in range(1, layers + 1)]
    if isinstance(method, str) and " every " in method:
        raise OptionError(f'{field} as a phrase must be like "linear, softmax every 4th layer"; got {method!r}.')
    return [resolve(from_json(method))] * layers


def _phrase(method: Any) -> re.Match[str] | None:
    return _EVERY.fullmatch(method) if isinstance(method, str) else None
