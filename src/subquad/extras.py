"""Libraries that only a part of subquad needs, loaded when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from subquad.errors import MissingExtraError

_PACKAGES = {  # of each extra
    "convert": "peft",
    "report": "altair vl-convert-python jinja2",
    "train": "datasets pillow pyarrow sacrebleu scikit-learn",
}


def need(extra: str, what: str, *modules: str) -> list[Any]:
    """The modules, or one error that says which extra `what` needs."""
    try:
        return [import_module(module) for module in modules]
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{what} needs the extra subquad[{extra}]; {error.name} is not installed. "
            f"Install it: pip install {_PACKAGES[extra]}"
        ) from error
