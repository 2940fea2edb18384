"""What several commands share: a progress bar, tables, and options of a method on the command line."""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from typer import BadParameter

from subquad.errors import OptionError
from subquad.families.base import Mechanism
from subquad.registry import resolve
from subquad.runs.progress import Progress

LINE_EVERY = 60.0  # seconds
_WIDEST = 1_000  # columns of a table


class Bar:
    """A progress bar with a message and the time left; if the output is not a terminal, a line a minute instead.

    Args:
        is_shown: False for a bar that prints nothing.
        precision: what comes before the time left: "about", or "at most".
    """

    def __init__(self, is_shown: bool = True, precision: str = "about") -> None:
        columns = (TextColumn("{task.description:<44}"), BarColumn(), TextColumn("{task.fields[left]}"))
        console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=not is_shown)
        self._bar = RichProgress(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal))
        self._task = self._bar.add_task("starting", total=1.0, left="")
        self._precision = precision
        self._printed_at = time.monotonic()

    def show(self, progress: Progress) -> None:
        """The progress callback of a command."""
        left = "" if progress.seconds_left is None else f"{self._precision} {duration(progress.seconds_left)} left"
        self._bar.update(self._task, completed=progress.fraction, description=progress.message, left=left)
        console = self._bar.console
        if not console.is_terminal and time.monotonic() > self._printed_at + LINE_EVERY:
            console.print(", ".join(filter(None, [progress.message, f"{progress.fraction:.0%}", left])), markup=False)
            self._printed_at = time.monotonic()

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def duration(seconds: float) -> str:
    """Seconds in words, such as "2 min 05 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def print_table(console: Console, table: Any) -> None:
    """A table of a report (`subquad.report.tables.Table`): words at the left, then numbers."""
    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column, heading in enumerate(table.headings):
        found.add_column("\n".join(heading.split()), justify="right" if column else "left", no_wrap=True)
    for row in table.rows:
        found.add_row(*(escape(cell.text) for cell in row))
    print_whole(console, found)


def print_whole(console: Console, table: Table) -> None:
    """In a window that is too narrow its lines run on: a figure that is cut is none."""
    needed = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    width, console.width = console.width, max(console.width, needed)
    console.print(table)
    console.width = width


def folder_named(text: str) -> Path:
    """For --out."""
    if not text:
        raise BadParameter("a folder has a name; got an empty one. Leave it out, or write . for this folder.")
    return Path(text)


def configured(method: str, options: Sequence[str], example: str = "--option features=128") -> Mechanism:
    """The method with options that were written as name=value."""
    named = {name: _value(text) for name, text in named_values(options, example).items()}
    return type(resolve(method))(**named)


def named_values(options: Sequence[str], example: str) -> dict[str, str]:
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
