"""Two checkouts, call by call in turn: how much longer the new one takes than the old one.

    python benchmarks/before_after.py OLD_CHECKOUT --lengths 1024,4096 --out before_after.json

Each checkout runs in a process of its own. For every method, length and pass the two take turns, round after round, in random
order, so that whatever disturbs the machine disturbs both. Where a process happens to get its memory changes its times, so
the whole sweep is repeated with new processes. A figure is the median of (new time / old time) over all rounds of all sweeps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Cell = tuple[str, int, bool, str]
Times = list[tuple[float, float]]  # (old, new) seconds
CELLS: tuple[tuple[bool, str], ...] = ((False, "forward"), (True, "forward"), (False, "training"))
WORKER = """
import json, sys, time, torch
from benchmarks.engines import METHODS, directions, runner

runs = {}
print(json.dumps(METHODS), flush=True)
for line in sys.stdin:
    do, method, length, is_causal, which = json.loads(line)
    if do == "prepare":
        able = method == "sdpa" or is_causal in directions(method, length)
        if able:
            torch.manual_seed(0)
            run = runner(method, length, is_causal, which)
            with torch.set_grad_enabled(which == "training"):
                run()
                start = time.perf_counter()
                run()
                repeats = max(1, min(50, round(0.02 / (time.perf_counter() - start))))
        print(json.dumps(able), flush=True)
    else:
        with torch.set_grad_enabled(which == "training"):
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            print(json.dumps((time.perf_counter() - start) / repeats), flush=True)
"""


class Checkout:
    def __init__(self, folder: Path) -> None:
        paths = {"PYTHONPATH": os.pathsep.join([str(folder / "src"), str(folder)])}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=pipe, stdout=pipe, text=True, cwd=folder, env={**os.environ, **paths}
        )
        self.methods: list[str] = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, *order: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout to compare with, its kernels compiled")
    parser.add_argument("--methods", help="names, separated by semicolons; by default all of benchmarks/engines.py")
    parser.add_argument("--lengths", default="1024,4096")
    parser.add_argument("--sweeps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7, help="of each sweep")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    cells: dict[Cell, Times] = {}
    for sweep in range(options.sweeps):
        print(f"sweep {sweep + 1} of {options.sweeps}", flush=True)
        _sweep(options, cells)
    rows = [_row(cell, times) for cell, times in cells.items()]
    for row in rows:
        direction = "causal" if row["is_causal"] else "bidirectional"
        interval = f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        print(f"{row['method']:20} {row['length']:6} {direction:13} {row['pass']:9} {interval}, {1000 * row['seconds']:.2f} ms")
    if options.out:
        record = {"lengths": options.lengths, "sweeps": options.sweeps, "rounds": options.rounds, "cells": rows}
        options.out.write_text(json.dumps(record, indent=1))


def _sweep(options: argparse.Namespace, cells: dict[Cell, Times]) -> None:
    """Time every cell with two new processes, and append (old, new) times to it."""
    checkouts = {"old": Checkout(options.old.resolve()), "new": Checkout(ROOT)}
    known = [m for m in checkouts["new"].methods if m in checkouts["old"].methods]
    methods = options.methods.split(";") if options.methods else known
    for length in map(int, options.lengths.split(",")):
        for is_causal, which in CELLS:
            for method in ["sdpa", *methods]:
                cell = (method, length, is_causal, which)
                able = [side.ask("prepare", *cell) for side in checkouts.values()]  # both, so that both are ready
                if not all(able):
                    continue
                for _ in range(options.rounds):
                    taken = {name: checkouts[name].ask("time", *cell) for name in random.sample(list(checkouts), 2)}
                    cells.setdefault(cell, []).append((taken["old"], taken["new"]))
    for side in checkouts.values():
        side.close()


def _row(cell: Cell, times: Times) -> dict[str, Any]:
    ratios = sorted(new / old for old, new in times)
    method, length, is_causal, which = cell
    return {
        "method": method,
        "length": length,
        "is_causal": is_causal,
        "pass": which,
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 10],
        "high": ratios[-1 - len(ratios) // 10],
        "seconds": statistics.median(new for _, new in times),
    }


if __name__ == "__main__":
    main()
