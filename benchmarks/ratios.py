"""Ratios that the operators promise: hybrid attention against SDPA, padding against none, and peak memory against `local`.

    python benchmarks/ratios.py --out benchmarks/ratios.json

The two sides of a ratio take turns in one process, in random order. A figure is the median over rounds of one time over the
other. Memory is the peak of a worker process above its inputs.
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

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks.common import header, middle_80_percent, new_table, write
from benchmarks.engines import HEAD_DIM, HEADS, PASSES, peak, resolve_at, runner

LENGTHS = (1024, 4096)
PADDED = ("local", "longformer")
PADS = 16  # one token in so many
MEMORY_LENGTH = 16384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    results: dict[str, Any] = {**header(__file__, sys.argv[1:], HEADS, HEAD_DIM), "rounds": options.rounds, "rows": []}
    for name, length, which, pair in cases():
        results["rows"].append({"ratio": name, "length": length, "pass": which, **compare(*pair, options.rounds, which)})
        if options.out:
            write(options.out, results)
    hybrid, local = (peak(method, MEMORY_LENGTH, True, "forward", HEADS) for method in ("hybrid", "local"))
    results["rows"].append(
        {
            "ratio": "peak memory of hybrid over local, causal",
            "length": MEMORY_LENGTH,
            "pass": "forward",
            "median": hybrid / local,
        }
    )
    if options.out:
        write(options.out, results)
    table = new_table("Ratios", "ratio", "length", "pass", "median", "10% to 90%")
    for row in results["rows"]:
        spread = f"{row['from']:.2f} to {row['to']:.2f}" if "from" in row else "-"
        table.add_row(row["ratio"], f"{row['length']:,}", row["pass"], f"{row['median']:.2f}", spread)
    Console().print(table)


def cases() -> list[tuple[str, int, str, tuple[Callable[[], object], Callable[[], object]]]]:
    """What to compare: a name, a length, a pass, and the two calls whose times are divided."""
    found = []
    for length in LENGTHS:
        for which in PASSES:
            pair = runner("sdpa", length, True, which), runner("hybrid", length, True, which)
            found.append(("SDPA over hybrid, causal", length, which, pair))
            for method in PADDED:
                for side in ("right", "left"):
                    pair = padded(method, length, side, which), padded(method, length, None, which)
                    found.append((f"{method} with pads on the {side} over without", length, which, pair))
    return found


def padded(method: str, length: int, side: str | None, which: str) -> Callable[[], object]:
    """A call whose sequences have pads on one side, or none."""
    training = which == "training"
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=training) for _ in range(3))
    module = resolve_at(method, length).build(heads=HEADS, head_dim=HEAD_DIM).eval()
    real = torch.ones(1, length, dtype=torch.bool)
    if side is not None:
        real[:, slice(-(length // PADS), None) if side == "right" else slice(length // PADS)] = False
    mask = None if side is None else real
    gradient = torch.randn(1, HEADS, length, HEAD_DIM)

    def run() -> object:
        out = module(q, k, v, is_causal=True, key_padding_mask=mask)
        return torch.autograd.grad(out, [q, k, v], gradient) if training else out

    return run


def compare(first: Callable[[], object], second: Callable[[], object], rounds: int, which: str) -> dict[str, float]:
    ratios = []
    with torch.set_grad_enabled(which == "training"):
        first(), second()
        for _ in range(rounds):
            taken = {run: seconds(run) for run in random.sample([first, second], 2)}
            ratios.append(taken[first] / taken[second])
    low, high = middle_80_percent(ratios)
    return {"median": statistics.median(ratios), "from": low, "to": high}


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
