"""The parts that only a picture or a page needs, loaded when one is made."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from subquad import MissingExtraError


def need(what: str, *modules: str) -> list[Any]:
    """The modules, or one error that says which extra `what` needs."""
    try:
        return [import_module(module) for module in modules]
    except ImportError as error:
        raise MissingExtraError(
            f"{what} needs the extra subquad[report]; {error.name} is not installed. "
            "Install it: pip install altair vl-convert-python jinja2"
        ) from error
