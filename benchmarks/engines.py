"""The engines against PyTorch's fused attention, on this machine.

    python benchmarks/engines.py --lengths 1024,4096 --growth "" --memory-length 0     # about three minutes on two cores
    python benchmarks/engines.py --out benchmarks/engines.json                         # everything, about fifteen

Every method is first checked against its reference. Then all methods take turns, round after round, in one process, and each is
compared with `scaled_dot_product_attention` in the same round, so that disturbances of the machine affect both. A ratio is the
median over rounds; the interval contains the middle 80 percent of them. Growth is the slope of log(time), and of log(memory),
against log(length). Memory is the peak of a worker process above its inputs.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

import subquad as sq
from subquad import reference
from subquad.registry import resolve

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks.common import describe_setup, header, markdown, middle_80_percent, new_table, parse_numbers, write

HEADS, HEAD_DIM = 8, 64
PASSES = ("forward", "training")  # training: forward and backward
# Names of methods with other options than the defaults.
NAMED: dict[str, Callable[[int], sq.Mechanism]] = {
    "local, window 512": lambda n: sq.Local(window=512),
}
ALL = [name for name in sq.methods() if name not in ("softmax", "svd", "rfa")]
METHODS = [*ALL[: ALL.index("local")], "local, window 512", *ALL[ALL.index("local") :]]
# Their cost grows faster than the length, as their records say.
MORE_THAN_LINEAR = ("sparse_strided", "sparse_fixed", "pooled")

PEAK = """
import sys, torch
from pathlib import Path
from benchmarks.engines import runner

def kilobytes(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

length, method, is_causal, which, heads = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", sys.argv[4], int(sys.argv[5])
run = runner(method, length, is_causal, which, heads)
with torch.set_grad_enabled(which == "training"):
    runner(method, 512, is_causal, which, heads)()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = kilobytes("VmRSS")
    run()
print((kilobytes("VmHWM") - before) * 1024)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=";".join(METHODS), help="names, separated by semicolons")
    parser.add_argument("--lengths", default="1024,2048,4096,16384", help="lengths to compare with SDPA; empty: none")
    parser.add_argument("--rounds", type=int, default=11, help="rounds up to 4,096 tokens; three for longer sequences")
    parser.add_argument("--growth", default="4096,16384,65536", help="lengths for the growth of time and memory; empty: none")
    parser.add_argument("--growth-passes", default="forward", help="forward, training or both, separated by commas")
    parser.add_argument("--memory-length", type=int, default=1_000_000, help="tokens for the kernelized memory table; 0: none")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    methods, lengths = options.methods.split(";"), parse_numbers(options.lengths) if options.lengths else []

    for method in methods:
        check_agreement(method)
    results: dict[str, Any] = {
        **header(__file__, sys.argv[1:], HEADS, HEAD_DIM),
        "time": [],
        "growth": [],
        "memory": [],
    }

    def keep() -> None:
        if options.out:
            write(options.out, results)

    for length in lengths:
        for is_causal, which in ((False, "forward"), (True, "forward"), (False, "training")):
            results["time"] += measure(methods, length, options.rounds if length <= 4096 else 3, is_causal, which)
            keep()
    if options.growth:
        for which in options.growth_passes.split(","):
            results["growth"] += growth(methods, parse_numbers(options.growth), which)
            keep()
    if options.memory_length:
        kernelized = [m for m in methods if resolve_at(m, 1).info.engine == "kernelized"]
        results["memory"] = [memory(m, options.memory_length, c) for m in kernelized for c in (False, True)]
    show(results)
    keep()


def resolve_at(method: str, length: int) -> sq.Mechanism:
    return NAMED[method](length) if method in NAMED else resolve(method).for_length(length)


def runner(method: str, length: int, is_causal: bool, which: str, heads: int = HEADS) -> Callable[[], object]:
    """A call on fresh random inputs."""
    training = which == "training"
    q, k, v = (torch.randn(1, heads, length, HEAD_DIM, requires_grad=training) for _ in range(3))
    if method == "sdpa":
        run: Callable[[], Any] = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)  # noqa: E731
    else:
        mechanism = resolve_at(method, length)
        k = q if mechanism.shares_query_and_key else k
        module = mechanism.build(heads=heads, head_dim=HEAD_DIM).eval()
        run = lambda: module(q, k, v, is_causal=is_causal)  # noqa: E731
    if not training:
        return run
    gradient = torch.randn(1, heads, length, HEAD_DIM)
    return lambda: torch.autograd.grad(run(), [q, k, v] if k is not q else [q, v], gradient, allow_unused=True)


def directions(method: str, length: int) -> Iterable[bool]:
    return [c for c in (False, True) if not (c and resolve_at(method, length).reasons(["is_causal"]))]


def check_agreement(method: str) -> None:
    """Do not time a method whose results are wrong."""
    length = 300
    q, k, v = (torch.randn(1, 2, length, HEAD_DIM) for _ in range(3))
    mechanism = resolve_at(method, length)
    k = q if mechanism.shares_query_and_key else k
    module = mechanism.build(heads=2, head_dim=HEAD_DIM).eval()
    weights = {name: t.detach() for name, t in module.state_dict(keep_vars=True).items()}
    for is_causal in directions(method, length):
        call: dict[str, Any] = {"weights": weights, "is_causal": is_causal}
        exact = reference.attention(mechanism, q.double(), k.double(), v.double(), **call)
        plain = reference.attention(mechanism, q, k, v, **call)
        with torch.no_grad():
            error = (module(q, k, v, is_causal=is_causal).double() - exact).norm()
        if error > 2 * (plain.double() - exact).norm():
            raise SystemExit(f"{method}, is_causal={is_causal}: off its reference by {error / exact.norm():.2e}; not timed.")


def measure(methods: list[str], length: int, rounds: int, is_causal: bool, which: str) -> list[dict[str, object]]:
    names = ["sdpa", *(m for m in methods if is_causal in directions(m, length))]
    label = f"{length:,} tokens, {'causal, ' if is_causal else ''}{which}"
    seconds = timed({name: runner(name, length, is_causal, which) for name in names}, rounds, which, label)
    rows: list[dict[str, object]] = []
    for method, taken in seconds.items():
        ratios = [s / t for s, t in zip(seconds["sdpa"], taken, strict=True)]
        rows.append(
            {
                "length": length,
                "method": method,
                "is_causal": is_causal,
                "pass": which,
                "rounds": rounds,
                "milliseconds": round(statistics.median(taken) * 1e3, 3),
                "times_sdpa": round(statistics.median(ratios), 3),
                "times_sdpa_80_percent": [round(edge, 3) for edge in middle_80_percent(ratios)],
            }
        )
    return rows


def timed(runs: dict[str, Callable[[], object]], rounds: int, which: str, label: str) -> dict[str, list[float]]:
    """Seconds of each by round; in every round all run once, in random order."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    with torch.set_grad_enabled(which == "training"):
        for run in runs.values():
            run()
        for _ in track(range(rounds), description=label, transient=True, console=Console(stderr=True)):
            for name in order.sample(list(runs), len(runs)):
                start = time.perf_counter()
                runs[name]()
                seconds[name].append(time.perf_counter() - start)
    return seconds


def growth(methods: list[str], lengths: list[int], which: str) -> list[dict[str, object]]:
    """Slopes of time and memory against length on logarithmic axes, by least squares."""
    times: dict[str, list[float]] = {method: [] for method in methods}
    for length in lengths:
        runs = {method: runner(method, length, False, which) for method in methods}
        seconds = timed(runs, 5 if length <= 16384 else 3, which, f"growth, {length:,} tokens, {which}")
        for method, taken in seconds.items():
            times[method].append(statistics.median(taken))
    rows: list[dict[str, object]] = []
    for method in track(methods, description="memory", transient=True, console=Console(stderr=True)):
        peaks = [peak(method, length, False, which, HEADS) for length in lengths]
        rows.append(
            {
                "method": method,
                "pass": which,
                "lengths": lengths,
                "milliseconds": [round(t * 1e3, 3) for t in times[method]],
                "time_slope": round(slope(lengths, times[method]), 3),
                "megabytes": [round(p / 2**20, 1) for p in peaks],
                "memory_slope": round(slope(lengths, peaks), 3),
                "is_linear": method not in MORE_THAN_LINEAR,
            }
        )
    return rows


def slope(lengths: list[int], values: list[float]) -> float:
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(v) for v in values]).slope


def peak(method: str, length: int, is_causal: bool, which: str, heads: int) -> float:
    """Peak bytes of a pass beyond its inputs, with its output."""
    command = [sys.executable, "-c", PEAK, str(length), method, str(is_causal), which, str(heads)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    return float(done.stdout)


def memory(method: str, length: int, is_causal: bool) -> dict[str, object]:
    whole = 4 * length * HEAD_DIM * 4  # inputs and output
    multiple = round(peak(method, length, is_causal, "forward", 1) / whole, 3)
    return {"length": length, "method": method, "is_causal": is_causal, "peak_over_inputs_and_output": multiple}


def section(results: dict[str, Any]) -> str:
    """For docs/performance.md: growth and memory."""
    lengths = [f"{n:,}" for n in results["growth"][0]["lengths"]]
    rows = [
        [
            f"`{r['method']}`",
            r["pass"],
            *(f"{ms:.0f}" for ms in r["milliseconds"]),
            f"{r['time_slope']:.2f}",
            f"{r['memory_slope']:.2f}",
        ]
        for r in results["growth"]
    ]
    table = markdown(["method", "pass", *(f"ms at {n}" for n in lengths), "time exponent", "memory exponent"], rows)
    most = max(results["memory"], key=lambda row: row["peak_over_inputs_and_output"])
    memory = (
        f"At {most['length']:,} tokens and one head of {HEAD_DIM} channels, a forward pass of a kernelized mechanism needs at "
        f"most {most['peak_over_inputs_and_output']:.2f} times the memory of inputs and output together."
    )
    return "\n".join([describe_setup(results), "", *table, "", memory, "", f"Command: `{results['command']}`."])


def show(results: dict[str, Any]) -> None:
    console = Console()
    console.print(results["machine"])
    title = f"B=1, H={HEADS}, D={HEAD_DIM}, float32; times faster than SDPA of the same kind"
    table = new_table(title, "tokens", "pass", "causal", "method", "ms", "times SDPA", "80% of rounds")
    for row in results["time"]:
        low, high = row["times_sdpa_80_percent"]
        cells = f"{row['length']:,}", row["pass"], "yes" if row["is_causal"] else "no", row["method"]
        table.add_row(*cells, f"{row['milliseconds']:.2f}", f"{row['times_sdpa']:.2f}", f"{low:.2f} - {high:.2f}")
    console.print(table)
    if results["growth"]:
        table = new_table(
            "Growth with the length: slopes of log(time) and log(memory)", "method", "pass", "time", "memory", "cost"
        )
        for row in results["growth"]:
            cost = "linear" if row["is_linear"] else "more than linear"
            table.add_row(row["method"], row["pass"], f"{row['time_slope']:.2f}", f"{row['memory_slope']:.2f}", cost)
        console.print(table)
    if results["memory"]:
        title = "Peak memory added by a forward pass, H=1, D=64, as a multiple of inputs + output"
        table = new_table(title, "tokens", "method", "causal", "multiple")
        for row in results["memory"]:
            causal = "yes" if row["is_causal"] else "no"
            table.add_row(f"{row['length']:,}", row["method"], causal, f"{row['peak_over_inputs_and_output']:.2f}")
        console.print(table)


if __name__ == "__main__":
    main()
