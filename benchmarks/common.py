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

from subquad.runs.files import write_atomically
from subquad.runs.machine import describe_machine

_LEFT = ("cell", "cost", "method", "pass", "peer", "state")  # columns of words


def machine() -> dict[str, object]:
    return {**describe_machine(), "threads": torch.get_num_threads()}


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
    write_atomically(path, f"{json.dumps(results, indent=2)}\n".encode())


def new_table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _LEFT else "right")
    return table


def on(machine: dict[str, Any]) -> str:
    """The machine in a few words."""
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {threads}, {machine['system']}, PyTorch {machine['torch']}, "
        f"Python {machine['python']}"
    )


def where(results: dict[str, Any]) -> str:
    """On which machine, and what was measured, in a sentence each."""
    shape = results["shape"]
    return (
        f"{on(results['machine'])}. Batch {shape['batch']}, {shape['heads']} heads of {shape['head_dim']} channels, "
        f"{shape['dtype']}."
    )


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
