"""Compiled against eager: whether `torch.compile` keeps the kernels, and how often it compiles for new lengths.

    python benchmarks/compile.py --lengths 1024,4096 --out benchmarks/compile.json

Eager and compiled calls take turns in one process, in random order. A figure is the median of (eager time / compiled time), so
compiled is faster above 1. Before anything is timed, the two must agree. Calls with 4096, 4000, 3500 and 3001 tokens in turn
show how often it compiles.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import subquad as sq

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks.common import describe_setup, header, markdown, middle_80_percent, new_table, parse_numbers, write
from benchmarks.engines import HEAD_DIM, HEADS, directions, resolve_at

IN_TURN = (4096, 4000, 3500, 3001)
WITHOUT_KERNELS = ("softmax", "svd", "linformer", "induced")
METHODS = [name for name in sq.methods() if name not in WITHOUT_KERNELS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--lengths", type=parse_numbers, default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {**header(__file__, sys.argv[1:], HEADS, HEAD_DIM), "rounds": options.rounds, "rows": []}
    for method in options.methods.split(","):
        for is_causal in directions(method, max(options.lengths)):
            for which in ("forward", "training"):
                results["rows"] += measure(method, is_causal, which, options.lengths, options.rounds)
                if options.out:
                    write(options.out, results)
    show(results)


def measure(method: str, is_causal: bool, which: str, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    count = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal count
        count += 1
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)

    mechanism = resolve_at(method, max(lengths))
    module = mechanism.build(heads=HEADS, head_dim=HEAD_DIM).eval()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return module(query, query if mechanism.shares_query_and_key else key, value, is_causal=is_causal)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for length in IN_TURN:
        run(compiled, length, which)()
    rows = []
    for length in lengths:
        calls = {"eager": run(attend, length, which), "compiled": run(compiled, length, which)}
        for ours, theirs in zip(*(call() for call in calls.values()), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        ratios, milliseconds = [], []
        for _ in range(rounds):
            found = {name: seconds(calls[name]) for name in random.sample(list(calls), 2)}
            ratios.append(found["eager"] / found["compiled"])
            milliseconds.append(1000 * found["compiled"])
        low, high = middle_80_percent(ratios)
        rows.append(
            {
                "method": method,
                "is_causal": is_causal,
                "pass": which,
                "length": length,
                "speedup": statistics.median(ratios),
                "from": low,
                "to": high,
                "compiled_ms": statistics.median(milliseconds),
                "compilations": count,
            }
        )
    return rows


def run(function: Callable[..., Tensor], length: int, which: str) -> Callable[[], tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(1, HEADS, length, HEAD_DIM, generator=generator).requires_grad_(which == "training") for _ in range(3)]

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (function(*x),)

    def training() -> tuple[Tensor, ...]:
        return tuple(g for g in torch.autograd.grad(function(*x).sum(), x, allow_unused=True) if g is not None)

    return training if which == "training" else forward


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def show(results: dict[str, Any]) -> None:
    table = new_table("Compiled against eager", "method", "pass", "length", "eager / compiled", "10% to 90%", "compilations")
    for row in results["rows"]:
        name = f"{row['method']}{', causal' if row['is_causal'] else ''}"
        spread = f"{row['from']:.2f} to {row['to']:.2f}"
        table.add_row(name, row["pass"], f"{row['length']:,}", f"{row['speedup']:.2f}", spread, str(row["compilations"]))
    Console().print(table)


def section(results: dict[str, Any]) -> str:
    """The table in docs/performance.md."""
    rows = []
    for method, is_causal in dict.fromkeys((row["method"], row["is_causal"]) for row in results["rows"]):
        own = [row for row in results["rows"] if (row["method"], row["is_causal"]) == (method, is_causal)]
        cells = [f"{row['speedup']:.2f}" for row in own]
        rows.append([f"`{method}`{', causal' if is_causal else ''}", *cells, str(max(row["compilations"] for row in own))])
    passes = [f"{row['pass']}, {row['length']:,}" for row in results["rows"] if row["method"] == results["rows"][0]["method"]]
    headings = ["method", *dict.fromkeys(passes), "compilations"]
    return "\n".join([describe_setup(results), "", *markdown(headings, rows), "", f"Command: `{results['command']}`"])


if __name__ == "__main__":
    main()
