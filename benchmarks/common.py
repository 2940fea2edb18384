"""What the benchmarks share: the machine, the command, spreads, tables, and files that are never half written."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterable, Sequence
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


def where(results: dict[str, Any]) -> str:
    """On which machine, and what was measured, in a sentence each."""
    at, shape = results["machine"], results["shape"]
    return (
        f"{at['processor']}, {at['cores']} cores, {at['threads']} threads, {at['system']}, PyTorch {at['torch']}, "
        f"Python {at['python']}. Batch {shape['batch']}, {shape['heads']} heads of {shape['head_dim']} channels, "
        f"{shape['dtype']}."
    )


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
