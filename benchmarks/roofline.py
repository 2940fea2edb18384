"""How close each mechanism comes to the limits of this machine.

    python benchmarks/roofline.py --out benchmarks/roofline.json

Two limits are measured: the speed of matrix products, and that of memory, by copying. A forward pass needs a minimum number
of multiplications and additions, and it must read its inputs and write its output; the longer of the two times is its
limit. `share` is the limit divided by the time taken. The limit does not include other work, such as exponentials, masks,
sorting, or what a causal chunk computes twice. Limits and mechanisms take turns in rounds, and a share is that of one
round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import subquad as sq

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks.common import describe_setup, header, markdown, middle_80_percent, new_table, parse_numbers, write
from benchmarks.engines import HEAD_DIM, HEADS, directions, resolve_at, runner, timed
from subquad.report.attention_map import attention_map

METHODS = [name for name in sq.methods() if name not in ("softmax", "svd")]
SIDE = 1024  # of the matrices that are multiplied
COPIED = 2**26  # bytes that are copied
_MAPPED = 4096  # maximum tokens for counting pairs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS), help="names, separated by commas")
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    results: dict[str, Any] = {
        **header(__file__, given, HEADS, HEAD_DIM),
        "cells": [],
    }
    for length in parse_numbers(options.lengths):
        for is_causal in (False, True):
            results["cells"] += measure(options.methods.split(","), length, is_causal, options.rounds)
            if options.out:
                write(options.out, results)
    show(results)


def measure(methods: Sequence[str], length: int, is_causal: bool, rounds: int) -> list[dict[str, Any]]:
    able = [m for m in methods if is_causal in directions(m, length)]
    runs: dict[str, Callable[[], object]] = {"product": _product(), "copy": _copy()}
    runs |= {method: runner(method, length, is_causal, "forward") for method in able}
    label = f"{length:,} tokens{', causal' if is_causal else ''}"
    taken = timed(runs, rounds, "forward", label)
    flops = [2 * SIDE**3 / t for t in taken["product"]]
    bandwidth = [2 * COPIED / t for t in taken["copy"]]
    cells = []
    for method in able:
        work, traffic = operations(method, length, is_causal), 4 * length * HEADS * HEAD_DIM * 4
        limits = [max(work / f, traffic / b) for f, b in zip(flops, bandwidth, strict=True)]
        shares = [limit / t for limit, t in zip(limits, taken[method], strict=True)]
        cells.append(
            {
                "method": method,
                "length": length,
                "is_causal": is_causal,
                "gigaflop": round(work / 1e9, 3),
                "megabytes": round(traffic / 1e6, 3),
                "limit_milliseconds": round(statistics.median(limits) * 1e3, 3),
                "milliseconds": round(statistics.median(taken[method]) * 1e3, 3),
                "share": round(statistics.median(shares), 3),
                "share_80_percent": [round(edge, 3) for edge in middle_80_percent(shares)],
                "product_gigaflops": round(statistics.median(flops) / 1e9, 1),
                "copy_gigabytes": round(statistics.median(bandwidth) / 1e9, 1),
            }
        )
    return cells


def operations(method: str, length: int, is_causal: bool) -> float:
    """The least multiplications and additions of a forward pass, over all heads."""
    mechanism: Any = resolve_at(method, length)
    engine = mechanism.info.engine
    if engine == "kernelized":
        directions = HEAD_DIM if method == "hedgehog" else getattr(mechanism, "features", 0)
        features = 2 * directions if method in ("rfa", "hedgehog") else directions or HEAD_DIM
        return float(HEADS * length * 4 * (directions + features) * HEAD_DIM)  # feature maps; into the sums, and out of them
    if method == "hybrid":  # the window, and hedgehog beyond it
        near = 1 + mechanism.window * (1 if is_causal else 2)
        return float(4 * HEADS * length * (min(near, length) + 3 * HEAD_DIM) * HEAD_DIM)
    if method == "clustered":  # codes, attention of the centroids, and the top keys of each query; k-means only counts bits
        return float(HEADS * length * HEAD_DIM * (2 * mechanism.bits + 4 * mechanism.clusters + 4 * mechanism.topk))
    if method == "pooled":
        near, far = (mechanism.window, length / 2) if is_causal else (2 * mechanism.window, length)
        return float(4 * HEADS * length * (near + 1 + far / mechanism.stride) * HEAD_DIM)
    if method == "linformer":  # two compressions, then attention to the compressed keys
        return float(HEADS * length * mechanism.rank * HEAD_DIM * 8)
    if method == "nystrom":  # attention to and from the landmarks, and the pseudo-inverse
        m = mechanism.landmarks
        return float(HEADS * (length * m * HEAD_DIM * 8 + mechanism.iterations * 4 * 2 * m**3))
    if method == "induced":
        return float(HEADS * length * mechanism.points * HEAD_DIM * 8)
    mapped = min(length, _MAPPED)
    share = attention_map(resolve_at(method, mapped), length=mapped, heads=1, head_dim=HEAD_DIM, is_causal=is_causal).share
    assert share is not None
    keys = share * mapped  # of a query, on average
    if engine == "block_sparse" and method.startswith("sparse"):
        keys *= (length / mapped) ** 0.5  # the stride grows with the root
    return 4 * HEADS * length * keys * HEAD_DIM


def _product() -> Callable[[], object]:
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    out = torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=out)


def _copy() -> Callable[[], object]:
    a = torch.randn(COPIED // 4)
    out = torch.empty_like(a)
    return lambda: out.copy_(a)


def show(results: dict[str, Any]) -> None:
    table = new_table("Share of the limit, forward", "method", "length", "causal", "limit ms", "ms", "share", "80% of rounds")
    for c in results["cells"]:
        low, high = c["share_80_percent"]
        figures = (f"{c['limit_milliseconds']:.2f}", f"{c['milliseconds']:.2f}", f"{c['share']:.2f}", f"{low:.2f} - {high:.2f}")
        table.add_row(c["method"], f"{c['length']:,}", "yes" if c["is_causal"] else "no", *figures)
    Console().print(table)


def section(results: dict[str, Any]) -> str:
    """For docs/performance.md."""
    lengths = sorted({c["length"] for c in results["cells"]})
    by = {(c["method"], c["is_causal"], c["length"]): c for c in results["cells"]}
    rows = []
    for method, is_causal in sorted({key[:2] for key in by}, key=lambda k: (METHODS.index(k[0]), k[1])):
        cells = [by[method, is_causal, n] for n in lengths]
        figures = [f"{c[f'{name}milliseconds']:.1f}" for c in cells for name in ("limit_", "")] + [
            f"{c['share']:.2f}" for c in cells
        ]
        rows.append([f"`{method}`", "yes" if is_causal else "no", *figures])
    headings = [f"{name} {n:,}" for n in lengths for name in ("limit in ms,", "time in ms,")] + [
        f"share, {n:,}" for n in lengths
    ]
    speeds = [statistics.median(c[name] for c in results["cells"]) for name in ("product_gigaflops", "copy_gigabytes")]
    limits = f"Matrix products run at {speeds[0]:.0f} GFLOP/s, memory at {speeds[1]:.0f} GB/s."
    table = markdown(["method", "causal", *headings], rows)
    return "\n".join([f"{describe_setup(results)} {limits}", "", *table, "", f"Command: `{results['command']}`."])


if __name__ == "__main__":
    main()
