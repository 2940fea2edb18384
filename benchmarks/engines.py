"""The engines against PyTorch's fused attention, on this machine.

    python benchmarks/engines.py                       # the table below, about two minutes on two cores
    python benchmarks/engines.py --lengths 1024,65536 --methods linear,performer --out results.json

Every method is first checked against its reference. Then all methods run in turn, round after round, in one process, and each
is compared with `scaled_dot_product_attention` of the same round, so that what disturbs the machine disturbs both. A ratio is
the median over rounds; the interval holds the middle 80 percent of them. Memory is a child process's peak above its inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table

import subquad as sq
from subquad import reference
from subquad.mechanisms import Spec

METHODS = "linear,efficient,taylor,plain,performer"
HEADS, HEAD_DIM = 8, 64

PEAK = """
import resource, sys, torch, subquad as sq
length, method, is_causal = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
q, k, v = (torch.randn(1, 1, length, 64) for _ in range(3))
with torch.no_grad():
    sq.attention(q[:, :, :512], k[:, :, :512], v[:, :, :512], method, is_causal=is_causal)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = sq.attention(q, k, v, method, is_causal=is_causal)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (4 * out.nbytes))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--lengths", default="1024,2048,4096")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--memory-length", type=int, default=1_000_000, help="tokens for the memory table; 0 leaves it out")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    methods, lengths = options.methods.split(","), [int(n) for n in options.lengths.split(",")]

    for method in methods:
        check_agreement(method)
    results = {
        "machine": machine(),
        "shape": {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "pass": "forward"},
        "rounds": options.rounds,
        "time": [row for n in lengths for row in measure(methods, n, options.rounds)],
        "memory": [],
    }
    if options.memory_length:
        results["memory"] = [peak(m, options.memory_length, c) for m in methods for c in (False, True)]
    show(results)
    if options.out:
        temporary = options.out.with_suffix(".part")
        temporary.write_text(json.dumps(results, indent=2) + "\n")
        os.replace(temporary, options.out)


def check_agreement(method: str) -> None:
    """No numbers for results that are wrong."""
    q, k, v = (torch.randn(1, 2, 300, HEAD_DIM) for _ in range(3))
    config = sq.registry.resolve(method)
    weights = config.buffers(Spec(2, 2, HEAD_DIM, HEAD_DIM))
    for is_causal in (False, True):
        exact = reference.attention(config, q.double(), k.double(), v.double(), weights=weights, is_causal=is_causal)
        plain = reference.attention(config, q, k, v, weights=weights, is_causal=is_causal)
        error = (sq.attention(q, k, v, config, is_causal=is_causal).double() - exact).norm()
        if error > 2 * (plain.double() - exact).norm():
            raise SystemExit(f"{method}, is_causal={is_causal}: off the reference by {error / exact.norm():.2e}; not timed.")


def measure(methods: list[str], length: int, rounds: int) -> list[dict[str, object]]:
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM) for _ in range(3))

    def runner(method: str, is_causal: bool) -> Callable[[], object]:
        if method == "sdpa":
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return lambda: sq.attention(q, k, v, method, is_causal=is_causal)

    runs = {(m, c): runner(m, c) for m in ("sdpa", *methods) for c in (False, True)}
    seconds: dict[tuple[str, bool], list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for run in runs.values():
            run()
        for _ in track(range(rounds), description=f"{length:,} tokens", transient=True, console=Console(stderr=True)):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    rows: list[dict[str, object]] = []
    for (method, is_causal), taken in seconds.items():
        ratios = sorted(s / t for s, t in zip(seconds["sdpa", is_causal], taken, strict=True))
        tenths = statistics.quantiles(ratios, n=10)
        rows.append(
            {
                "length": length,
                "method": method,
                "is_causal": is_causal,
                "milliseconds": round(statistics.median(taken) * 1e3, 3),
                "times_sdpa": round(statistics.median(ratios), 3),
                "times_sdpa_80_percent": [round(tenths[0], 3), round(tenths[-1], 3)],
            }
        )
    return rows


def peak(method: str, length: int, is_causal: bool) -> dict[str, object]:
    command = [sys.executable, "-c", PEAK, str(length), method, str(is_causal)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {
        "length": length,
        "method": method,
        "is_causal": is_causal,
        "peak_over_inputs_and_output": round(float(done.stdout), 3),
    }


def machine() -> dict[str, object]:
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "subquad": sq.__version__,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def show(results: dict[str, object]) -> None:
    console = Console()
    console.print(results["machine"])
    table = Table(title=f"Forward, B=1, H={HEADS}, D={HEAD_DIM}, float32; times faster than SDPA of the same kind")
    for heading in ("tokens", "method", "causal", "ms", "times SDPA", "80% of rounds"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in results["time"]:  # type: ignore[attr-defined]
        low, high = row["times_sdpa_80_percent"]
        cells = f"{row['length']:,}", row["method"], "yes" if row["is_causal"] else "no", f"{row['milliseconds']:.2f}"
        table.add_row(*cells, f"{row['times_sdpa']:.2f}", f"{low:.2f} - {high:.2f}")
    console.print(table)
    if results["memory"]:
        table = Table(title="Peak memory added by a forward pass, H=1, D=64, as a multiple of inputs + output")
        for heading in ("tokens", "method", "causal", "multiple"):
            table.add_column(heading, justify="left" if heading == "method" else "right")
        for row in results["memory"]:  # type: ignore[attr-defined]
            causal = "yes" if row["is_causal"] else "no"
            table.add_row(f"{row['length']:,}", row["method"], causal, f"{row['peak_over_inputs_and_output']:.2f}")
        console.print(table)


if __name__ == "__main__":
    main()
