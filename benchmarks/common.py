"""What the benchmarks share: the machine, the command, percentiles, tables, and files."""

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

_LEFT_ALIGNED = ("cell", "cost", "method", "pass", "peer", "state")


def machine() -> dict[str, object]:
    return {**describe_machine(), "threads": torch.get_num_threads()}


def command(script: str, arguments: Sequence[str]) -> str:
    """The command that repeats this run."""
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *arguments])


def header(script: str, arguments: Sequence[str], heads: int, head_dim: int) -> dict[str, Any]:
    """What the results of a benchmark begin with: command, machine and shape of the inputs."""
    shape = {"batch": 1, "heads": heads, "head_dim": head_dim, "dtype": "float32"}
    return {"command": command(script, arguments), "machine": machine(), "shape": shape}


def parse_numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def middle_80_percent(values: Sequence[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile; of fewer than ten values the smallest and the largest."""
    tenths = statistics.quantiles(values, n=10) if len(values) > 9 else [min(values), max(values)]
    return tenths[0], tenths[-1]


def write(path: Path, results: dict[str, Any]) -> None:
    """Write JSON atomically."""
    write_atomically(path, f"{json.dumps(results, indent=2)}\n".encode())


def new_table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _LEFT_ALIGNED else "right")
    return table


def describe(machine: dict[str, Any]) -> str:
    """The machine in a few words."""
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {threads}, {machine['system']}, PyTorch {machine['torch']}, "
        f"Python {machine['python']}"
    )


def describe_setup(results: dict[str, Any]) -> str:
    """The machine and the shape of the inputs."""
    shape = results["shape"]
    return (
        f"{describe(results['machine'])}. Batch {shape['batch']}, {shape['heads']} heads of {shape['head_dim']} channels, "
        f"{shape['dtype']}."
    )


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
