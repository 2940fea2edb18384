"""Cache size and speed of converted language models at the end of a long text: SmolLM2-135M at 8,192 tokens.

    make pretrained && python benchmarks/serving.py --data DIR

Each model first reads a text up to shortly before the position. Then, in every round, each generates a few tokens, in shuffled
order, and is compared with the original in that round. The last round ends at the position, where the bytes are counted. The
original caches keys and values, the converted models the state of their mechanism. Nothing is repaired, because that does not
change the size.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers.cache_utils import DynamicCache

import subquad as sq
from subquad.models import SubquadCache
from subquad.report import figures

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks import pretrained
from benchmarks.common import command, describe, machine, markdown, middle_80_percent, write
from benchmarks.studies import STUDIES

OUT = Path(__file__).with_suffix(".json")
BASE = "original"
PIECE = 1024  # tokens read at a time
SKIPPED = ("softmax", "linear")  # the original's own mechanism, and one with the state of performer


@dataclass
class Served:
    """A model that generates, its cache, and the seconds per token of each round."""

    model: Any
    cache: Any
    token: Tensor
    seconds: list[float] = field(default_factory=list)

    def read(self, ids: Tensor) -> None:
        logits = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.token = logits[:, -1:].argmax(-1)

    def write(self, tokens: int) -> None:
        begun = time.perf_counter()
        for _ in range(tokens):
            self.read(self.token)
        self.seconds.append((time.perf_counter() - begun) / tokens)

    @property
    def bytes(self) -> int:
        if isinstance(self.cache, SubquadCache):
            return self.cache.nbytes
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SUBQUAD_DATA"), help="folder with real text")
    parser.add_argument("--position", type=int, default=8192, help="tokens in the cache at the end")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=8, help="tokens that each model generates in each round")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    if options.data is None:
        parser.error("real text is needed: pass --data DIR, or set SUBQUAD_DATA")
    first = options.position - (options.rounds + 1) * options.tokens
    if first < 1 or min(options.rounds, options.tokens) < 1:
        parser.error("--position must be more than --tokens times (--rounds + 1), and --tokens and --rounds at least 1")
    served = measure(options, first)
    rows = [_row(name, one, served[BASE].seconds) for name, one in served.items()]
    asked = ["--data", "DIR", "--position", str(options.position), "--rounds", str(options.rounds)]
    about = {"command": command(__file__, asked), "machine": machine()}
    write(options.out, {**about, "position": options.position, "rounds": options.rounds, "rows": rows})


@torch.inference_mode()
def measure(options: argparse.Namespace, first: int) -> dict[str, Served]:
    """All models, after all rounds."""
    read = pretrained.smollm2()
    text = pretrained.war_and_peace(options.data)[: 10 * options.position]
    [ids] = (batch["input_ids"] for batch in pretrained.packed(read.tokenizer, [text], first, 1)[:1])
    served = {BASE: Served(read.model, DynamicCache(config=read.model.config), ids[:, :0])}
    for name, mechanism in STUDIES["smollm2"].rows.items():
        if name not in SKIPPED:
            model = sq.convert(read.model, mechanism, copy=True)
            served[name] = Served(model, SubquadCache(model.config), ids[:, :0])
    for one in track(list(served.values()), description="reading", transient=True):
        for piece in ids.split(PIECE, dim=1):
            one.read(piece)
        one.write(options.tokens)  # warm
        one.seconds.clear()
    order, shuffle = list(served.values()), random.Random(0).shuffle
    for _ in track(range(options.rounds), description="writing", transient=True):
        shuffle(order)
        for one in order:
            one.write(options.tokens)
    return served


def _row(name: str, served: Served, base: Sequence[float]) -> dict[str, Any]:
    ratios = [theirs / own for theirs, own in zip(base, served.seconds, strict=True)]
    return {
        "model": name,
        "bytes": served.bytes,
        "tokens_per_second": round(statistics.median(1 / s for s in served.seconds), 2),
        "times_original": round(statistics.median(ratios), 3),
        "times_original_80_percent": [round(edge, 3) for edge in middle_80_percent(ratios)],
    }


def section(results: dict[str, Any]) -> str:
    """For docs/converting.md."""
    most = results["rows"][0]["bytes"]
    lines = []
    for row in results["rows"]:
        low, high = row["times_original_80_percent"]
        speed = f"{row['tokens_per_second']:.1f}", f"{row['times_original']:.2f} ({low:.2f} to {high:.2f})"
        lines.append([row["model"], figures.size(row["bytes"]), f"1 / {most / row['bytes']:.1f}", *speed])
    headings = [
        f"at {results['position']:,} tokens",
        "cache",
        "of the original's",
        "tokens per second",
        "speed relative to the original",
    ]
    about = f"{describe(results['machine'])}. Medians over {results['rounds']} rounds, with the middle 80 percent."
    return "\n".join([about, "", *markdown(headings, lines), "", f"Command: `{results['command']}`."])


if __name__ == "__main__":
    main()
