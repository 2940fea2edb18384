"""Part `files`: whatever a file holds, it loads normally or is refused with one message, and nothing in it is executed.

A case takes an intact set of files of one kind (see `readers`), damages one of them, and reads them as a user would. Findings
are errors other than a `SubquadError`, code that ran, text from a file that acts as markup in a page or controls the terminal,
and changes to files that must not be touched.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import traceback
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from subquad.errors import SubquadError
from tests.soak import FINDINGS
from tests.soak.damage import TAG
from tests.soak.readers import READERS
from tests.soak.readers.base import captured

COUNT = 2_000
SECONDS = 120
_MEMORY = 6 * 2**30  # bytes that a case may allocate: a file that demands more must be refused


def run_case(seed: int, index: int, folder: Path) -> dict[str, Any]:
    chance = random.Random(f"files {seed} {index}")
    name = chance.choices(list(READERS), [reader.share for reader in READERS.values()])[0]
    reader, mark = READERS[name](), folder / "executed"
    with captured() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files = reader.prepare(folder, chance)
        kind, done = reader.spoil(files, mark, chance)
        verdict, error = "answered", ""
        try:
            with _limited_memory():
                reader.read(folder, chance)
        except SubquadError as refusal:
            verdict, error = ("refused", "") if str(refusal).strip() else ("wrong", "refused without a message")
        except Exception as foreign:
            verdict, error = "foreign error", _last_lines(foreign)
    if wrong := _obeyed(folder, mark, out.getvalue()):
        verdict, error = "wrong", wrong
    found = {"verdict": verdict, "labels": {"file": name, "damage": kind}}
    if verdict in FINDINGS:
        found |= {"error": f"{name}, {kind}, {done}: {error}"}
        found |= {"reproduction": f"python -m tests.soak --part files --seed {seed} --only {index}"}
    return found


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit data rather than address space: the engine that draws charts reserves much address space that it does not use."""
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + _MEMORY, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _last_lines(error: Exception) -> str:
    where = [frame for frame in traceback.extract_tb(error.__traceback__) if "/subquad/" in frame.filename][-1:]
    places = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in where]
    return f"{type(error).__name__}: {str(error)[:300]} {' '.join(places)}"


def _obeyed(folder: Path, mark: Path, printed: str) -> str:
    """What content of the files had an effect; empty if none had."""
    if mark.exists():
        return "code in a file was executed"
    if "\x1b]" in printed:
        return "text from a file controls the terminal"
    for page in folder.rglob("*.html"):
        if wrong := fault_of_page(page.read_text()):
            return f"{page.name}: {wrong}"
    return ""


def fault_of_page(text: str) -> str:
    """What is wrong with a page: text from a file that a browser would take for markup, or data that it cannot read."""
    page = _Page()
    page.feed(text)
    page.close()
    return page.wrong


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.wrong = ""
        self.is_data = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if TAG in tag or any(TAG in name for name, _ in attributes):
            self.wrong = f"text from a file acts as markup in the page: {self.get_starttag_text()}"
        self.is_data = tag == "script" and ("type", "application/json") in attributes

    def handle_data(self, data: str) -> None:
        if self.is_data:
            try:
                json.loads(data, parse_constant=_refuse)
            except ValueError as error:
                self.wrong = f"the data in the page is not valid JSON: {error}"
        self.is_data = False


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
