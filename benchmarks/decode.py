"""Generation token by token: speed and cache size by mechanism and position, on this machine.

    python benchmarks/decode.py --positions 1024,8192 --rounds 5                      # a quick run
    python benchmarks/decode.py --stream 100000 --out benchmarks/decode.json          # everything; up to 5 GB of memory

A language model with each method must first give the same logits one token at a time, and in pieces, as all at once: their
error against float64 logits may be at most twice that of all at once. Then a cache is filled with random tokens up to each
position. In every round each method decodes a few tokens greedily at each position, in shuffled order, from the same cache,
and is compared with softmax at that position in that round, so that disturbances of the machine affect both. A figure is
the median over rounds; the interval contains the middle 80 percent of them. The first token of a round is not timed,
because a growing cache is copied there, which normally happens once and not every few tokens. Bytes are those of the cache
at its position; the JSON also has those while it decodes, with the space that it reserves for more tokens.

With `--stream`, `generate` then runs for that many tokens, and the time, the memory of the process and the size of the
cache are recorded on the way. The sequence of `generate` itself grows by a few bytes per token, whatever the method.

After Ctrl-C, what was measured is printed and written.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress, track
from torch import Tensor

import subquad as sq
from subquad.models import SubquadCache, SubquadConfig, SubquadForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks.common import command, machine, middle_80_percent, new_table, parse_numbers, write

SEED = 0
VOCABULARY = 256
PIECE = 1024  # tokens per call while a cache is filled
PROMPT = 300  # tokens that must agree: more than local's window
BASE = "softmax"  # what the others are compared with
STATUS = Path("/proc/self/status")


@dataclass
class Cell:
    """A method at a position: the cache to start from, and the seconds per token of each round."""

    method: str
    position: int
    model: SubquadForCausalLM
    cache: SubquadCache
    decoding_bytes: int = 0
    seconds: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    sizes = {"layers": options.layers, "hidden": options.hidden, "heads": options.heads}
    streamed = [options.stream_method] if options.stream else []
    try:
        models = {method: build(method, **sizes) for method in dict.fromkeys([*options.methods, *streamed])}
    except sq.SubquadError as error:
        raise SystemExit(str(error)) from None
    results: dict[str, Any] = {
        "command": command(__file__, arguments),
        "machine": {**machine(), "transformers": transformers.__version__},
        "shape": {"batch": 1, **sizes, "intermediate": 4 * options.hidden, "vocabulary": VOCABULARY, "dtype": "float32"},
        "tokens_a_round": options.tokens,
        "finished": False,
        "agreement": {},
        "cells": [],
        "stream": {},
    }

    def keep() -> None:
        if options.out:
            write(options.out, results)

    try:
        for method in track(models, description="agreement", transient=True, console=Console(stderr=True)):
            results["agreement"][method] = check_agreement(method, models[method])
        measure(results, {method: models[method] for method in options.methods}, options.positions, options)
        keep()
        if options.stream:
            stream(results, options.stream_method, models[options.stream_method], options.stream)
        results["finished"] = True
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted. These are the results so far.")
    keep()
    show(results)
    if not results["finished"]:
        raise SystemExit(130)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="softmax;linear;performer;local", help="as in a config, separated by semicolons")
    parser.add_argument("--positions", default="1024,8192,65536", help="tokens in the cache when decoding starts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512, help="the feed-forward layer is four times as wide")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=32, help="tokens to decode at each position in each round")
    parser.add_argument("--stream", type=int, default=0, help="tokens to generate in one run at the end; 0: none")
    parser.add_argument("--stream-method", default="linear")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args(arguments)
    options.methods = list(dict.fromkeys(options.methods.split(";")))
    try:
        options.positions = sorted(set(parse_numbers(options.positions)))
    except ValueError:
        parser.error(f"--positions must be whole numbers, separated by commas; got {options.positions!r}.")
    if min(*options.positions, options.rounds, options.tokens) < 1 or options.stream < 0:
        parser.error("--positions, --rounds and --tokens must be at least 1, and --stream at least 0.")
    if options.out and not options.out.parent.is_dir():
        parser.error(f"--out must be a file in an existing directory; got {options.out}.")
    return options


def build(method: str, layers: int, hidden: int, heads: int) -> SubquadForCausalLM:
    torch.manual_seed(SEED)
    config = SubquadConfig(
        method=method,
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        position="rotary",
    )
    return SubquadForCausalLM(config).eval()


def tokens_at_random(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(SEED))


def forward(model: SubquadForCausalLM, tokens: Tensor, cache: SubquadCache, keep: int = 1) -> Tensor:
    """Logits of the last `keep` tokens, (1, keep, V); 0: of all."""
    logits: Tensor = model(tokens, past_key_values=cache, logits_to_keep=keep).logits
    return logits


@torch.inference_mode()
def check_agreement(method: str, model: SubquadForCausalLM) -> dict[str, float]:
    """Relative errors of the logits: all at once, in pieces, one token at a time. A method that is wrong is not timed."""
    tokens = tokens_at_random(PROMPT)
    exact = copy.deepcopy(model).double()(tokens, use_cache=False).logits

    def error(logits: Tensor) -> float:
        return float((logits.double() - exact).norm() / exact.norm())

    errors = {"all_at_once": error(model(tokens, use_cache=False).logits)}
    for name, size in (("in_pieces", PROMPT // 3 + 1), ("one_at_a_time", 1)):
        cache = SubquadCache(model.config)
        errors[name] = error(torch.cat([forward(model, piece, cache, 0) for piece in tokens.split(size, dim=1)], dim=1))
        if not errors[name] <= 2 * errors["all_at_once"]:
            raise SystemExit(f"{method}: {name.replace('_', ' ')} is off by {errors[name]:.2e}; not timed. All: {errors}")
    return errors


@torch.inference_mode()
def measure(
    results: dict[str, Any], models: dict[str, SubquadForCausalLM], positions: list[int], options: argparse.Namespace
) -> None:
    """Tokens per second and bytes of each method at each position; `results` is updated after every round."""
    cells: list[Cell] = []
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task("filling the caches", total=len(models) * positions[-1])
        for method, model in models.items():
            cells += fill(method, model, positions, lambda n: progress.advance(task, n))
    for cell in cells:
        run(cell, options.tokens)  # warm-up
    order, shuffler = list(cells), random.Random(SEED)
    for _ in track(range(options.rounds), description="decoding", transient=True, console=Console(stderr=True)):
        shuffler.shuffle(order)
        for cell in order:
            cell.seconds.append(run(cell, options.tokens))
        results["cells"] = summary(cells)


def fill(method: str, model: SubquadForCausalLM, positions: list[int], advance: Callable[[int], None]) -> list[Cell]:
    """A cache at each position."""
    cache, cells = SubquadCache(model.config), []
    tokens, start = tokens_at_random(positions[-1]), 0
    for position in positions:
        for piece in tokens[:, start:position].split(PIECE, dim=1):
            forward(model, piece, cache)
            advance(piece.shape[1])
        cells.append(Cell(method, position, model, branch(model, cache)))
        start = position
    return cells


def branch(model: SubquadForCausalLM, cache: SubquadCache) -> SubquadCache:
    """Another cache with copies of the states; a model overwrites those of the cache that it continues."""
    other = SubquadCache(model.config)
    for new, old in zip(other.layers, cache.layers, strict=True):
        new.past.value = old.past.value.clone()
    other.position.value = cache.position.value
    return other


def run(cell: Cell, tokens: int) -> float:
    """Seconds per token, decoding greedily from the cell's cache."""
    cache = branch(cell.model, cell.cache)
    token = forward(cell.model, tokens_at_random(1), cache)[:, -1:].argmax(-1)  # a growing cache is copied here
    cell.decoding_bytes = cache.nbytes
    start = time.perf_counter()
    for _ in range(tokens):
        token = forward(cell.model, token, cache)[:, -1:].argmax(-1)
    return (time.perf_counter() - start) / tokens


def summary(cells: list[Cell]) -> list[dict[str, object]]:
    base = {cell.position: cell.seconds for cell in cells if cell.method == BASE}
    rows: list[dict[str, object]] = []
    for cell in cells:
        speeds = [1 / seconds for seconds in cell.seconds]
        ratios = [b / s for b, s in zip(base[cell.position], cell.seconds, strict=True)] if base else None
        rows.append(
            {
                "method": cell.method,
                "position": cell.position,
                "rounds": len(speeds),
                "milliseconds": round(statistics.median(cell.seconds) * 1e3, 3),
                "milliseconds_80_percent": [round(edge * 1e3, 3) for edge in middle_80_percent(cell.seconds)],
                "tokens_per_second": round(statistics.median(speeds), 2),
                "tokens_per_second_80_percent": [round(edge, 2) for edge in middle_80_percent(speeds)],
                "times_softmax": None if ratios is None else round(statistics.median(ratios), 3),
                "times_softmax_80_percent": None if ratios is None else [round(edge, 3) for edge in middle_80_percent(ratios)],
                "cache_bytes": cell.cache.nbytes,
                "cache_bytes_decoding": cell.decoding_bytes,
                "milliseconds_by_round": [round(seconds * 1e3, 3) for seconds in cell.seconds],
            }
        )
    return rows


class StreamMonitor:
    """A streamer for `generate` that records time and memory at the prompt and after every few tokens."""

    def __init__(self, cache: SubquadCache, every: int, note: Callable[[dict[str, float]], None]) -> None:
        self.cache, self.every, self.note = cache, every, note
        self.tokens = -1  # the prompt comes first
        self.start = 0.0

    def put(self, _: Tensor) -> None:
        self.tokens += 1
        if self.tokens == 0:
            self.start = time.perf_counter()
        if self.tokens % self.every == 0:
            self._mark()

    def end(self) -> None:
        if self.tokens > 0 and self.tokens % self.every:
            self._mark()

    def _mark(self) -> None:
        seconds = round(time.perf_counter() - self.start, 6)
        sizes = {"process_bytes": resident(), "cache_bytes": self.cache.nbytes}
        self.note({"tokens": self.tokens, "seconds": seconds, **sizes})


def stream(results: dict[str, Any], method: str, model: SubquadForCausalLM, tokens: int) -> None:
    """Run `generate` for `tokens` tokens; `results` is updated every thousand of them, or ten times if there are fewer."""
    cache, marks = SubquadCache(model.config), []
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{method}: a stream of {tokens:,} tokens", total=tokens)

        def note(mark: dict[str, float]) -> None:
            marks.append(mark)
            progress.update(task, completed=mark["tokens"])
            if len(marks) > 1:
                results["stream"] = {"method": method, "asked": tokens, **tenths(marks), "marks": marks}

        monitor = StreamMonitor(cache, min(1000, max(1, tokens // 10)), note)
        prompt = tokens_at_random(1)
        try:
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                past_key_values=cache,
                max_new_tokens=tokens,
                do_sample=False,
                streamer=monitor,
            )
        except KeyboardInterrupt:
            monitor.end()  # with the tokens since the last mark
            raise


def tenths(marks: list[dict[str, float]]) -> dict[str, float]:
    """The first and the last tenth of a stream, between the marks nearest to them."""
    first, last = marks[0], marks[-1]
    early = next(mark for mark in marks if mark["tokens"] * 10 >= last["tokens"])
    late = next(mark for mark in reversed(marks[:-1]) if mark["tokens"] * 10 <= last["tokens"] * 9)

    def milliseconds(start: dict[str, float], end: dict[str, float]) -> float:
        return round((end["seconds"] - start["seconds"]) / (end["tokens"] - start["tokens"]) * 1e3, 3)

    return {
        "tokens": last["tokens"],
        "milliseconds_first_tenth": milliseconds(first, early),
        "milliseconds_last_tenth": milliseconds(late, last),
        "process_bytes_after_first_tenth": early["process_bytes"],
        "process_bytes_growth_since": last["process_bytes"] - early["process_bytes"],
        "cache_bytes_after_first_tenth": early["cache_bytes"],
        "cache_bytes": last["cache_bytes"],
    }


def resident() -> int:
    """Resident bytes of this process; their peak if the system does not report them."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def show(results: dict[str, Any]) -> None:
    console, shape = Console(), results["shape"]
    console.print(results["machine"])
    title = f"B=1, {shape['layers']} layers of {shape['hidden']}, {shape['heads']} heads, float32; 80%: of rounds"
    table = new_table(title, "method", "position", "tokens/s", "80%", "times softmax", "cache MiB")
    for row in results["cells"]:
        low, high = row["tokens_per_second_80_percent"]
        speed = f"{row['tokens_per_second']:.1f}", f"{low:.1f} - {high:.1f}"
        ratio = "-" if row["times_softmax"] is None else f"{row['times_softmax']:.2f}"
        table.add_row(row["method"], f"{row['position']:,}", *speed, ratio, f"{row['cache_bytes'] / 2**20:.2f}")
    console.print(table)
    if found := results["stream"]:
        title = f"A stream of {found['tokens']:,} tokens by generate, {found['method']}"
        table = new_table(title, "tenth", "ms per token", "process MiB", "cache MiB")
        early = found["process_bytes_after_first_tenth"]
        sizes = (
            (early, found["cache_bytes_after_first_tenth"]),
            (early + found["process_bytes_growth_since"], found["cache_bytes"]),
        )
        for which, pair in zip(("first", "last"), sizes, strict=True):
            milliseconds = found[f"milliseconds_{which}_tenth"]
            table.add_row(which, f"{milliseconds:.2f}", *(f"{size / 2**20:.2f}" for size in pair))
        console.print(table)


if __name__ == "__main__":
    main()
