"""What several commands share: a progress bar, and options of a method on the command line."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from subquad import Config, OptionError
from subquad.registry import resolve


class Bar:
    """A progress bar with what is done now and the time left."""

    def __init__(self, is_shown: bool = True) -> None:
        columns = (TextColumn("{task.description:<44}"), BarColumn(), TextColumn("{task.fields[left]}"))
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_shown)
        self._task = self._progress.add_task("starting", total=1.0, left="")

    def show(self, doing: str, share: float, left: str) -> None:
        self._progress.update(self._task, completed=share, description=doing, left=left)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def configured(method: str, options: Sequence[str]) -> Config:
    """The method with options that were written as name=value."""
    named = {name: _value(text) for name, text in named_values(options).items()}
    return type(resolve(method))(**named)


def named_values(options: Sequence[str], example: str = "--option features=128") -> dict[str, str]:
    """What name=value says, by name."""
    named: dict[str, str] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or name in named:
            raise OptionError(f"an option is name=value, each name once; got {option!r}. Write it as {example}.")
        named[name] = text
    return named


def _value(text: str) -> Any:
    """Numbers, True, False, None and tuples such as 1,2,4 as Python reads them; anything else is a word."""
    try:
        value = ast.literal_eval(text.title() if text.lower() in ("true", "false") else text)
    except (SyntaxError, TypeError, ValueError):
        return text
    return value if isinstance(value, (int, float, tuple, type(None))) else text
