"""How the error of FAVOR+ falls with more random features, on the queries, keys and values of a pretrained encoder.

    make pretrained && python benchmarks/features.py --data DIR

The estimate of e^(q . k) is a mean over m random directions, with a relative variance of (e^(|q + k|^2) - 1) / m. So the error
of a head should fall as m^(-1/2), by half for four times the features, once m is above e^(|q + k|^2). It is measured at every
head of all-MiniLM-L6-v2, on its inputs in the original model for sentences of STS-B's training pairs, for several draws of the
directions: unchanged, and with queries and keys divided by 2 and by 4, where fewer features suffice.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import subquad as sq
from subquad.conversion.activations import AttentionCall, recordable, run_recorded
from subquad.conversion.diagnosis import head_errors

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks import pretrained
from benchmarks.common import command, describe, machine, markdown, parse_numbers, write

OUT = Path(__file__).with_suffix(".json")
SENTENCES = 64


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SUBQUAD_DATA"), help="folder with real text")
    parser.add_argument("--features", default="16,64,256,1024,4096", help="m, separated by commas")
    parser.add_argument("--divided", default="1,2,4", help="divisors of queries and keys, separated by commas")
    parser.add_argument("--draws", type=int, default=5, help="draws of the directions for each m")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    if options.data is None:
        parser.error("real text is needed: pass --data DIR, or set SUBQUAD_DATA")
    read = pretrained.minilm()
    batches = pretrained.sentences(read.tokenizer, options.data)[: SENTENCES // pretrained.BATCH]
    with recordable(read.model) as model:
        calls = [run_recorded(model, batch)[0] for batch in batches]
    rows = []
    for divisor in parse_numbers(options.divided):
        smaller = [{site: _divided(one, divisor) for site, one in batch.items()} for batch in calls]
        size = _size(smaller)
        for features in track(
            parse_numbers(options.features), description=f"divided by {divisor}", console=Console(stderr=True)
        ):
            found = [_error(smaller, sq.Performer(features=features, seed=draw)) for draw in range(options.draws)]
            errors = [round(error, 5) for error in found]
            rows.append({"divided_by": divisor, "size": float(f"{size:.4g}"), "features": features, "errors": errors})
    asked = ["--data", "DIR", "--features", options.features, "--divided", options.divided, "--draws", str(options.draws)]
    about = {"command": command(__file__, asked), "machine": machine()}
    write(options.out, {**about, "sentences": SENTENCES, "rows": rows})


@torch.no_grad()
def _divided(call: AttentionCall, divisor: int) -> AttentionCall:
    """The same call with smaller queries and keys, and the output of softmax for them."""
    smaller = replace(call, query=call.query / divisor, key=call.key / divisor)
    heads, head_dim = call.query.shape[1], call.query.shape[3]
    return replace(smaller, output=smaller.replay(sq.Softmax().build(heads=heads, head_dim=head_dim)))


def _size(calls: Sequence[dict[str, AttentionCall]]) -> float:
    """The median of |q + k|^2 over pairs of real tokens, with queries and keys times D^(-1/4), averaged over heads."""
    found = []
    for site in calls[0]:
        sizes = []  # of batches, (H, pairs)
        for one in (batch[site] for batch in calls):
            x, y = (t * t.shape[-1] ** -0.25 for t in (one.query, one.key))
            real = torch.ones(x.shape[0], x.shape[2], dtype=torch.bool) if one.real_queries is None else one.real_queries
            sums = torch.cdist(x, -y).square()  # (B, H, N, M)
            sizes.append(sums.transpose(0, 1)[:, real[:, :, None] & real[:, None, :]])
        found += torch.cat(sizes, dim=1).median(dim=1).values.tolist()
    return statistics.mean(found)


@torch.no_grad()
def _error(calls: Sequence[dict[str, AttentionCall]], performer: sq.Performer) -> float:
    """The mean over heads of |o' - o| / |o|."""
    errors = []
    for site in calls[0]:
        query = calls[0][site].query
        mechanism = performer.build(heads=query.shape[1], head_dim=query.shape[3])
        pairs = [head_errors(batch[site], batch[site].replay(mechanism)) for batch in calls]
        missed, had = (torch.stack(sums).sum(0) for sums in zip(*pairs, strict=True))
        errors += (missed / had).sqrt().tolist()
    return statistics.mean(errors)


def section(results: dict[str, Any]) -> str:
    """For docs/converting.md: one table per size of queries and keys."""
    by_divisor: dict[int, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        by_divisor.setdefault(row["divided_by"], []).append(row)
    draws = len(results["rows"][0]["errors"])
    about = f"{describe(results['machine'])}. {results['sentences']} sentences, {draws} draws."
    headings = ["features m", "relative error", "range over draws", "exponent of m from the row above"]
    tables = [
        "\n".join([_title(divisor, rows[0]["size"]), "", *markdown(headings, _lines(rows))])
        for divisor, rows in by_divisor.items()
    ]
    return "\n\n".join([about, *tables, f"Command: `{results['command']}`."])


def _title(divisor: int, size: float) -> str:
    what = "Queries and keys unchanged" if divisor == 1 else f"Queries and keys divided by {divisor}"
    return f"{what}; the median of |q + k|^2 is {size:.1f}:"


def _lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    lines, before = [], None
    for row in rows:
        mean = statistics.mean(row["errors"])
        slope = "" if before is None else f"{math.log(mean / before[1]) / math.log(row['features'] / before[0]):.2f}"
        lines.append([f"{row['features']:,}", f"{mean:.3f}", f"{min(row['errors']):.3f} to {max(row['errors']):.3f}", slope])
        before = row["features"], mean
    return lines


if __name__ == "__main__":
    main()
