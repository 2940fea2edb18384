"""What several commands share: the progress bar, tables, and options written as name=value."""

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
from subquad.runs.typed_json import printable

LINE_EVERY = 60.0  # seconds
_MAX_WIDTH = 1_000  # characters of a table


def as_text(value: object) -> str:
    """`value` for rich to print as it is: no markup, and no characters that a terminal obeys."""
    return escape(printable(str(value)))


class Bar:
    """A progress bar with a message and the time left; if the output is not a terminal, a line a minute instead.

    Args:
        is_shown: False for a bar that prints nothing.
        precision: what comes before the time left: "about", or "at most".
    """

    def __init__(self, is_shown: bool = True, precision: str = "about") -> None:
        columns = (TextColumn("{task.description:<44}", markup=False), BarColumn(), TextColumn("{task.fields[left]}"))
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
    """Print a table of a report (`subquad.report.tables.Table`): the first column is text, the others are numbers."""
    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column, heading in enumerate(table.headings):
        found.add_column(as_text("\n".join(heading.split())), justify="right" if column else "left", no_wrap=True)
    for row in table.rows:
        found.add_row(*(as_text(cell.text) for cell in row))
    print_whole(console, found)


def print_whole(console: Console, table: Table) -> None:
    """Print a table in full: if the window is too narrow, lines wrap rather than lose digits."""
    needed = Measurement.get(console, console.options.update(max_width=_MAX_WIDTH), table).maximum
    width, console.width = console.width, max(console.width, needed)
    console.print(table)
    console.width = width


def folder_named(text: str) -> Path:
    """The parser of --out."""
    if not text:
        raise BadParameter("a folder must have a name; got an empty one. Leave the option out, or pass . for this folder.")
    return Path(text)


def with_values(method: str, options: Sequence[str], example: str = "--option features=128") -> Mechanism:
    """The mechanism of that name, with options written as name=value."""
    named = {name: _value(text) for name, text in named_values(options, example).items()}
    return type(resolve(method))(**named)


def named_values(options: Sequence[str], example: str) -> dict[str, str]:
    """The values of options written as name=value, by name."""
    named: dict[str, str] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or name in named:
            raise OptionError(f"an option must be name=value, each name once; got {option!r}. Write it as {example}.")
        named[name] = text
    return named


def _value(text: str) -> Any:
    """A number, True, False, None or a tuple such as 1,2,4, if Python reads it as one; otherwise the text itself."""
    try:
        value = ast.literal_eval(text.title() if text.lower() in ("true", "false") else text)
    except (SyntaxError, TypeError, ValueError):
        return text
    return value if isinstance(value, (int, float, tuple, type(None))) else text
