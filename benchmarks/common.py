"""What the benchmarks share: the machine, the command, spreads, tables, and files that are never half written."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from subquad import files
from subquad.bench.machine import describe
from subquad.bench.results import Setting

_LEFT = ("method", "pass", "cost", "peer")  # columns of words


def machine() -> dict[str, object]:
    return {**describe(Setting()), "threads": torch.get_num_threads()}


def command(script: str, arguments: Sequence[str]) -> str:
    """The line that repeats this run."""
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *arguments])


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def middle(values: Sequence[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile; of fewer than ten values the least and the greatest."""
    tenths = statistics.quantiles(values, n=10) if len(values) > 9 else [min(values), max(values)]
    return tenths[0], tenths[-1]


def write(path: Path, results: dict[str, Any]) -> None:
    """As JSON, whole or not at all."""
    files.write(path, f"{json.dumps(results, indent=2)}\n".encode())


def new_table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _LEFT else "right")
    return table
