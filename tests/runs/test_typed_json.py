"""JSON as typed values: what fits is read, and what does not is named with its place."""

import json
import math
import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

import pytest

from subquad.runs.typed_json import Between, Figure, Matching, MisfitError, Scalar, dumps, load, parse


class Facts(TypedDict, total=False):
    files: list[str]


@dataclass
class Cell:
    kind: Literal["a", "b"]
    rounds: list[tuple[Annotated[float, Between(1e-9, 1e9)], float | None]] = field(default_factory=list)
    figure: Figure = math.nan


@dataclass
class Everything:
    name: Annotated[str, Matching("[a-z]+", "a name")]
    count: int
    is_done: bool
    cells: list[Cell]
    by_name: dict[str, Cell]
    facts: Facts
    machine: dict[str, Scalar]
    options: dict[str, Any]
    numbers: tuple[int, ...] = ()


CELL = {"kind": "a", "rounds": [[0.5, None], [2, 0.25]], "figure": 1.5}
WHOLE = {
    "name": "linear", "count": 3, "is_done": False, "cells": [CELL], "by_name": {"x": CELL}, "facts": {"files": ["f"]},
    "machine": {"a": "b", "c": 1, "d": 2.5, "e": True, "f": None}, "options": {"deep": [{"x": [1, "y", None]}]}, "numbers": [1, 2],
}  # fmt: skip


def changed(place, value):
    """A copy of WHOLE with something else at `place`; None of `value` removes it."""
    copy = json.loads(json.dumps(WHOLE))
    target = copy
    for step in place[:-1]:
        target = target[step]
    if value is REMOVED:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    return copy


REMOVED = object()


def test_what_fits_becomes_objects():
    found = parse(Everything, WHOLE)
    assert found == Everything(
        "linear", 3, False, [Cell("a", [(0.5, None), (2, 0.25)], 1.5)], {"x": Cell("a", [(0.5, None), (2, 0.25)], 1.5)},
        {"files": ["f"]}, WHOLE["machine"], WHOLE["options"], (1, 2),
    )  # fmt: skip
    assert parse(Everything, changed(["facts"], {})).facts == {}


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (["name"], "../etc", "name must be a name; got '../etc'"),
        (["name"], 3, "name must be text; got 3"),
        (["name"], REMOVED, "name is missing"),
        (["numbers"], REMOVED, "numbers is missing"),
        (["count"], True, "count must be an integer; got True"),
        (["count"], 1.0, "count must be an integer; got 1.0"),
        (["count"], 10**400, "count must be an integer of at most 64 bits; got 1000"),
        (["is_done"], 1, "is_done must be true or false; got 1"),
        (["cells"], {}, "cells must be a list; got {}"),
        (["cells", 0], [], r"cells\[0\] must be an object; got \[\]"),
        (["cells", 0, "kind"], [], r"cells\[0\].kind must be one of 'a', 'b'; got \[\]"),
        (["cells", 0, "other"], 1, r"cells\[0\] must have no entries other than kind, rounds, figure; got 'other'"),
        (["cells", 0, "rounds", 1, 0], 0, r"cells\[0\].rounds\[1\]\[0\] must be an integer from 1e-09 to 1e\+09; got 0"),
        (["cells", 0, "rounds", 1, 0], 10**400, r"rounds\[1\]\[0\] must be a finite number; got 1000"),
        (["cells", 0, "rounds", 1, 1], math.nan, r"rounds\[1\]\[1\] must be a finite number; got nan"),
        (["cells", 0, "rounds", 1, 1], math.inf, r"rounds\[1\]\[1\] must be a finite number; got inf"),
        (["cells", 0, "rounds", 1], [1], r"rounds\[1\] must be a list of 2 entries; got \[1\]"),
        (["cells", 0, "figure"], "many", r"figure must be a number; got 'many'"),
        (["by_name", "x", "kind"], "c", r"by_name\['x'\].kind must be one of"),
        (["facts", "more"], 1, "facts must have no entries other than files; got 'more'"),
        (["machine", "a"], [], r"machine\['a'\] must be text or an integer or a number or true or false or null; got \[\]"),
        (["options", "deep"], math.nan, r"options\['deep'\] must be text"),
    ],
)
def test_what_does_not_fit_is_named(place, value, said):
    with pytest.raises(MisfitError, match=said):
        parse(Everything, changed(place, value))


def test_a_key_that_does_not_fit_is_named():
    names = dict[Annotated[str, Matching("[a-z]+", "a name")], int]
    with pytest.raises(MisfitError, match=r"^a key of the file must be a name; got '\.\./x'$"):
        parse(names, {"../x": 1})
    with pytest.raises(MisfitError, match=r"^a key of cells\[0\] must be a name; got '\.\./x'$"):
        parse(names, {"../x": 1}, "cells[0]")


def test_deep_nesting_is_refused(tmp_path):
    deep = None
    for _ in range(50):
        deep = [deep]
    with pytest.raises(MisfitError, match=r"options\['deep'\]\[0\].* must be nested at most 16 levels deep"):
        parse(Everything, changed(["options", "deep"], deep))
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(MisfitError, match="it is nested too deeply"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" + b"9" * 5000 + b"]"])
def test_no_json(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(MisfitError, match="it is not valid JSON"):
        load(tmp_path / "file")


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf, 1e308, 7])
def test_a_figure_may_be_any_number_in_json_that_others_can_read(figure):
    text = dumps({"figure": figure, "kind": "b", "rounds": ()})
    json.loads(text, parse_constant=pytest.fail)
    found = parse(Cell, json.loads(text)).figure
    assert found == figure or (math.isnan(found) and math.isnan(figure))
    assert math.isnan(parse(Cell, {"figure": None, "kind": "b", "rounds": []}).figure)
    assert parse(Cell, json.loads(f'{{"figure": {json.dumps(figure)}, "kind": "b", "rounds": []}}')).kind == "b"


def test_text_cannot_control_a_terminal_or_break_a_file():
    found = parse(dict[str, Any], {"a\x1b]0;b": "\x1b[31mred\x9b\ud800\ttab\nline"})
    assert found == {"a\ufffd]0;b": "\ufffd[31mred\ufffd\ufffd\ttab\nline"}
    "".join([*found, *found.values()]).encode()


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "results.json")
    with pytest.raises(OSError, match="it is not a regular file"):
        load(tmp_path / "results.json")
