"""`listops`: the value of nested lists, [MAX 2 9 [MIN 4 7 ] 0 ] = 9.

Nangia & Bowman, 2018, "ListOps: a diagnostic dataset for latent tree learning", arXiv:1804.06028; with long sequences one of
the tasks of Tay et al., 2021, "Long Range Arena", arXiv:2011.04006. Expressions are generated at random, with lengths from a
quarter of `settings.length` up to it, lists of 2 to 10 arguments, and at most 10 levels.

The option `test` takes a test set of the original task from a local folder instead, without the parentheses of its binary trees
and without expressions longer than `settings.length`: `d20s` has the published operators, `d20` has FIRST and LAST instead of
MED and SM, in the generated training rows, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.errors import InputError
from subquad.families.base import Mechanism
from subquad.models import SubquadForSequenceClassification
from subquad.tasks.base import Settings, Splits, TaskInfo
from subquad.tasks.classes import Classification
from subquad.tasks.rows import Sequences, model_config, pad_rows
from subquad.tasks.source import DataError, find_file, parse_rows, read_lines, require_rows, task_folder

ARGUMENTS, DEPTH = 10, 10  # at most
TRAIN, HELD_OUT = 20_000, 1_000  # rows
MIN_LENGTH = 8  # tokens
OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: _median(sorted(values)),
    "SM": lambda values: sum(values) % 10,
    "FIRST": lambda values: values[0],
    "LAST": lambda values: values[-1],
}
_PUBLISHED = ("MIN", "MAX", "MED", "SM")
OPERATORS_OF = {"generated": _PUBLISHED, "d20s": _PUBLISHED, "d20": ("MIN", "MAX", "FIRST", "LAST")}  # by the option `test`
SYMBOLS = ["", *map(str, range(10)), *(f"[{name}" for name in OPERATORS), "]"]  # the first is padding
IDS = {symbol: i for i, symbol in enumerate(SYMBOLS)}


class ListOps(Classification):
    """The value, 0 to 9, of an expression."""

    info: ClassVar[TaskInfo] = TaskInfo(
        name="listops",
        idea="the value of nested lists of digits under MIN, MAX, MED and SM (sum modulo 10)",
        kind="bidirectional",
        metric="accuracy",
        higher_is_better=True,
        source="",
        folder="listops",
        defaults=Settings(length=128, layers=3, dim=64, heads=4, batch=32, lr=1e-3, steps=1_000),
        options={"test": tuple(OPERATORS_OF)},
    )

    def reads_folder(self, settings: Settings) -> bool:
        return self.options(settings)["test"] != "generated"

    def load(self, folder: Path | None, settings: Settings) -> Splits:
        if settings.length < MIN_LENGTH:
            raise InputError(f"the length of listops must be at least {MIN_LENGTH} tokens; got {settings.length}.")
        wanted = self.options(settings)["test"]
        draw = random.Random(settings.seed)
        operators = OPERATORS_OF[wanted]
        train, valid, test = (generate(count, settings.length, operators, draw) for count in (TRAIN, HELD_OUT, HELD_OUT))
        if wanted != "generated":
            test = self.original(wanted, folder, settings.length)
        return Splits(train, valid, test, pad_rows(IDS[""]))

    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        return SubquadForSequenceClassification(model_config(method, settings, vocab_size=len(SYMBOLS), num_labels=10))

    def original(self, wanted: str, folder: Path | None, length: int) -> Sequences:
        """A test set of the original task: each line has a value, a tab and an expression."""
        if folder is None:
            raise DataError(
                f"the original test sets of listops cannot be downloaded; test={wanted} needs --data DIR or SUBQUAD_DATA, "
                f"with {self.info.folder}/test_{wanted}.tsv.xz inside. Or choose test=generated."
            )
        path = find_file(self.info, task_folder(self.info, folder), [f"test_{wanted}.tsv.xz", f"test_{wanted}.tsv"])
        rows = [row for row in parse_rows(path, read_lines(path), _row, "value and expression") if len(row[1]) <= length]
        require_rows(self.info, len(rows), 1, f"test expressions of at most {length} tokens", "Choose a larger --length.")
        return Sequences(torch.tensor([value for value, _ in rows]), input_ids=[ids for _, ids in rows])


def _row(line: str) -> tuple[int, Tensor]:
    value, symbols = line.split("\t")
    ids = [IDS[symbol] for symbol in symbols.split() if symbol not in "()"]
    return range(10).index(int(value)), torch.tensor(ids, dtype=torch.uint8)


def generate(count: int, length: int, operators: tuple[str, ...], draw: random.Random) -> Sequences:
    """Random expressions of at most `length` tokens, and at least a quarter of that."""
    values, ids = [], []
    for _ in range(count):
        symbols: list[int] = []
        values.append(expression(draw.randint(max(4, length // 4), length), DEPTH, operators, draw, symbols))
        ids.append(torch.tensor(symbols, dtype=torch.uint8))
    return Sequences(torch.tensor(values), input_ids=ids)


def expression(length: int, depth: int, operators: tuple[str, ...], draw: random.Random, symbols: list[int]) -> int:
    """Append a list of exactly `length` tokens and at most `depth` levels to `symbols`, and return its value."""
    name = draw.choice(operators)
    symbols.append(IDS[f"[{name}"])
    values = []
    for size in _arguments(length - 2, depth, draw):
        if size == 1:
            values.append(draw.randrange(10))
            symbols.append(IDS[str(values[-1])])
        else:
            values.append(expression(size, depth - 1, operators, draw, symbols))
    symbols.append(IDS["]"])
    return OPERATORS[name](values)


def _arguments(tokens: int, depth: int, draw: random.Random) -> list[int]:
    """How many of `tokens` each argument takes: 1 for a digit, 4 or more for a list."""
    most = _longest(depth - 1)  # tokens of one argument
    fits = [n for n in range(2, ARGUMENTS + 1) if n == tokens or (n + 3 <= tokens <= n * most)]
    count = draw.choice(fits)
    spare = tokens - count
    if not spare:
        return [1] * count
    lists = draw.randint(-(-spare // (most - 1)), min(count, spare // 3))
    sizes = [1] * (count - lists)
    for left in range(lists - 1, -1, -1):
        more = draw.randint(max(3, spare - left * (most - 1)), min(most - 1, spare - 3 * left))
        sizes.append(1 + more)
        spare -= more
    draw.shuffle(sizes)
    return sizes


def _longest(depth: int) -> int:
    """The most tokens of an argument with at most `depth` levels."""
    return 1 if depth == 0 else 2 + ARGUMENTS * _longest(depth - 1)


def _median(values: list[int]) -> int:
    """The median of sorted values, rounded down as in the original task."""
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) // 2
