"""How the error of FAVOR+ falls with more random features, on the queries, keys and values of a pretrained encoder.

    make pretrained && python benchmarks/features.py --data DIR

The estimate of the softmax kernel is a mean over m directions drawn at random, so its error is expected to fall as m^(-1/2): by
half for four times the features. It is measured at every head of all-MiniLM-L6-v2, on what the original hands to it for
sentences of STS-B's training pairs, for several draws of the directions.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import subquad as sq
from subquad.conversion.diagnosis import head_errors
from subquad.conversion.observe import Seen, run, watchable

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks import pretrained
from benchmarks.common import command, machine, markdown, numbers, on, write

OUT = Path(__file__).with_suffix(".json")
SENTENCES = 256


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SUBQUAD_DATA"), help="folder with real text")
    parser.add_argument("--features", default="16,64,256,1024,4096", help="m, between commas")
    parser.add_argument("--draws", type=int, default=5, help="of the directions, for each m")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    if options.data is None:
        parser.error("real text is needed: --data DIR, or SUBQUAD_DATA")
    read = pretrained.minilm()
    batches = pretrained.sentences(read.tokenizer, options.data)[: SENTENCES // pretrained.BATCH]
    with watchable(read.model) as model:
        seen = [run(model, batch)[0] for batch in batches]
    rows = []
    for features in track(numbers(options.features), description="features", console=Console(stderr=True)):
        found = [_error(seen, sq.Performer(features=features, seed=draw)) for draw in range(options.draws)]
        rows.append({"features": features, "errors": [round(error, 5) for error in found]})
    write(
        options.out,
        {
            "command": command(__file__, ["--data", "DIR", "--features", options.features, "--draws", str(options.draws)]),
            "machine": machine(),
            "sentences": SENTENCES,
            "rows": rows,
        },
    )


@torch.no_grad()
def _error(seen: Sequence[dict[str, Seen]], config: sq.Performer) -> float:
    """The mean over heads of |o' - o| / |o|."""
    errors = []
    for site in seen[0]:
        query = seen[0][site].query
        mechanism = config.build(heads=query.shape[1], head_dim=query.shape[3])
        pairs = [head_errors(batch[site], batch[site].by(mechanism)) for batch in seen]
        missed, had = (torch.stack(sums).sum(0) for sums in zip(*pairs, strict=True))
        errors += (missed / had).sqrt().tolist()
    return statistics.mean(errors)


def section(results: dict[str, Any]) -> str:
    """For docs/converting.md."""
    means = [statistics.mean(row["errors"]) for row in results["rows"]]
    lines = []
    for i, (row, mean) in enumerate(zip(results["rows"], means, strict=True)):
        slope = ""
        if i:
            before = results["rows"][i - 1]["features"]
            slope = f"{math.log(mean / means[i - 1]) / math.log(row['features'] / before):.2f}"
        lines.append([f"{row['features']:,}", f"{mean:.3f}", f"{min(row['errors']):.3f} to {max(row['errors']):.3f}", slope])
    draws = len(results["rows"][0]["errors"])
    table = markdown(["features m", "relative error", f"of {draws} draws", "exponent of m since the row above"], lines)
    return "\n".join([f"{on(results['machine'])}. {results['sentences']} sentences.", "", *table, "",
                      f"The command: `{results['command']}`."])  # fmt: skip


if __name__ == "__main__":
    main()
