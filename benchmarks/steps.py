"""Attention alone, one token at a time: the time of a decode step after many tokens, on this machine.

    python benchmarks/steps.py --out benchmarks/steps.json

A state is filled up to each position. In every round each method takes a few steps from each of its states, in turns with the
others, and is compared with softmax, whose state is all keys and values so far, at that position in that round; then it takes
as many with donated states, which it may overwrite. A figure is the median over rounds; the interval contains the middle 80
percent of them. Beyond `--most` tokens there is no softmax to compare with. The first step of a round is not timed, because a
growing state is copied there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, track
from torch import Tensor

import subquad as sq
from subquad.registry import resolve
from subquad.state import State

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks.common import describe_setup, header, markdown, middle_80_percent, new_table, parse_numbers, write
from benchmarks.engines import HEAD_DIM, HEADS

BASE = "softmax"
METHODS = ",".join(
    [BASE, *(name for name in sq.methods(is_causal=True, decode=True) if name != BASE), "sparse_strided,sparse_fixed"]
)
STRIDE_FOR = 4096  # the length that mechanisms without a default stride get theirs for
PIECE = 8192  # tokens per call while a state is filled


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS, help="names, separated by commas")
    parser.add_argument("--positions", default="1024,8192,65536,1000000", help="tokens in the state when the steps begin")
    parser.add_argument("--most", type=int, default=65536, help="maximum tokens for softmax")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=64, help="steps in each round, at each position")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    results: dict[str, Any] = {
        **header(__file__, given, HEADS, HEAD_DIM),
        "cells": measure(options.methods.split(","), sorted(parse_numbers(options.positions)), options),
    }
    if options.out:
        write(options.out, results)
    show(results)


@torch.inference_mode()
def measure(methods: Sequence[str], positions: Sequence[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    states: dict[tuple[str, int], State] = {}
    attend = {method: build(method) for method in methods}
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        for method in methods:
            reached = [p for p in positions if method != BASE or p <= options.most]
            task = progress.add_task(f"{method}: its states", total=max(reached, default=0))
            states |= {(method, p): s for p, s in fill(attend[method], reached, lambda n, task=task: progress.advance(task, n))}
    seconds: dict[tuple[str, int], list[float]] = {cell: [] for cell in states}
    donated: dict[tuple[str, int], list[float]] = {cell: [] for cell in states}
    for _ in track(range(options.rounds), description="steps", transient=True, console=Console(stderr=True)):
        for (method, position), state in states.items():
            seconds[method, position].append(run(attend[method], state, options.steps))
            donated[method, position].append(run(attend[method], state.clone(), options.steps, donate=True))
    return [row(*cell, seconds, donated[cell], states[cell]) for cell in states]


@torch.inference_mode(False)
def build(method: str) -> Callable[..., tuple[Tensor, State]]:
    """Attention of queries, keys and values that continues a state; a module where the method has weights."""
    mechanism = resolve(method).for_length(STRIDE_FOR)
    call: Callable[..., Any] = partial(sq.attention, method=mechanism)
    if sq.why_not(mechanism, functional=True):
        call = mechanism.build(heads=HEADS, head_dim=HEAD_DIM, dim=HEADS * HEAD_DIM).eval()

    def attend(query: Tensor, key: Tensor, value: Tensor, state: State | None) -> tuple[Tensor, State]:
        key = query if mechanism.shares_query_and_key else key
        found: tuple[Tensor, State] = call(query, key, value, is_causal=True, state=state, return_state=True)
        return found

    return attend


def fill(attend: Callable[..., tuple[Tensor, State]], positions: Sequence[int], advance: Any) -> Any:
    """A state at each position; none shares memory with another."""
    generator, state, start = torch.Generator().manual_seed(0), None, 0
    for position in positions:
        while start < position:
            length = min(PIECE, position - start)
            q, k, v = tokens(length, generator)
            _, state = attend(q, k, v, state)
            start += length
            advance(length)
        assert state is not None
        yield position, state.clone()


def tokens(length: int, generator: torch.Generator | None = None) -> list[Tensor]:
    return [torch.randn(1, HEADS, length, HEAD_DIM, generator=generator) for _ in range(3)]


def run(attend: Callable[..., tuple[Tensor, State]], state: State, steps: int, *, donate: bool = False) -> float:
    """Seconds per step."""
    q, k, v = tokens(1)
    now = time.perf_counter()
    for step in range(steps + 1):
        if step == 1:
            now = time.perf_counter()
        _, state = attend(q, k, v, state.donate() if donate else state)
    return (time.perf_counter() - now) / steps


def row(
    method: str, position: int, seconds: dict[tuple[str, int], list[float]], donated: list[float], state: State
) -> dict[str, Any]:
    own, base = seconds[method, position], seconds.get((BASE, position))
    ratios = None if base is None else [b / s for b, s in zip(base, own, strict=True)]
    return {
        "method": method,
        "position": position,
        "rounds": len(own),
        "microseconds": round(statistics.median(own) * 1e6, 1),
        "microseconds_80_percent": [round(edge * 1e6, 1) for edge in middle_80_percent(own)],
        "microseconds_donated": round(statistics.median(donated) * 1e6, 1),
        "microseconds_donated_80_percent": [round(edge * 1e6, 1) for edge in middle_80_percent(donated)],
        "times_softmax": None if ratios is None else round(statistics.median(ratios), 2),
        "times_softmax_80_percent": None if ratios is None else [round(edge, 2) for edge in middle_80_percent(ratios)],
        "state_bytes": state.nbytes,
    }


def show(results: dict[str, Any]) -> None:
    table = new_table(
        "A decode step, attention alone", "method", "position", "microseconds", "80%", "donated", "times softmax", "state MiB"
    )
    for cell in results["cells"]:
        low, high = cell["microseconds_80_percent"]
        ratio = "-" if cell["times_softmax"] is None else f"{cell['times_softmax']:.1f}"
        size = f"{cell['state_bytes'] / 2**20:.2f}"
        figures = f"{cell['microseconds']:.0f}", f"{low:.0f} - {high:.0f}", f"{cell['microseconds_donated']:.0f}"
        table.add_row(cell["method"], f"{cell['position']:,}", *figures, ratio, size)
    Console().print(results["machine"], table)


def section(results: dict[str, Any]) -> str:
    """For docs/performance.md."""
    positions = sorted({c["position"] for c in results["cells"]})
    has_donated = all("microseconds_donated" in c for c in results["cells"])
    by = {(c["method"], c["position"]): c for c in results["cells"]}
    rows = []
    for method in dict.fromkeys(c["method"] for c in results["cells"]):
        cells = [by.get((method, p)) for p in positions]
        steps = ["-" if c is None else f"{c['microseconds']:.0f}" for c in cells]
        times = ["-" if c is None or c["times_softmax"] is None else f"{c['times_softmax']:.1f}" for c in cells]
        donated = [f"{c['microseconds_donated']:.0f}" if c else "-" for c in cells] if has_donated else []
        rows.append([f"`{method}`", *steps, *donated, *times])
    headings = [f"{p:,}" for p in positions]
    columns = ["microseconds at", *(["state donated, at"] if has_donated else []), "times faster than softmax at"]
    table = markdown(["method", *(f"{column} {h}" for column in columns for h in headings)], rows)
    return "\n".join([describe_setup(results), "", *table, "", f"Command: `{results['command']}`."])


if __name__ == "__main__":
    main()
