"""A compiled subquad model against Hugging Face's Llama of the same size in eager mode, token by token, on this machine.

    python benchmarks/generation.py --out benchmarks/generation.json

Both models have the same layers but for attention: rotary positions, RMS norms, SwiGLU, no biases. A cache is filled with
random tokens up to each position. In every round Llama, the subquad model and the compiled subquad model decode a few tokens
each, in turns, from copies of their caches; ratios are those of one round. A figure is the median over rounds; the interval
contains the middle 80 percent of them. The first two tokens of a round are not timed. The compiled model must give the logits
of the eager one, and must be compiled once for all positions.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from subquad.models import SubquadCache, SubquadConfig, SubquadForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks.common import command, machine, middle_80_percent, new_table, parse_numbers, write

SEED, VOCABULARY = 0, 256
PIECE = 1024  # tokens per call while a cache is filled
WARM_UP = 2  # tokens of a round that are not timed
LLAMA, EAGER, COMPILED = "llama", "eager", "compiled"

Decode = Callable[[Tensor, Any], Tensor]  # the logits (1, 1, V) of a token (1, 1), whose cache is updated


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="linear", help="of the subquad model")
    parser.add_argument("--positions", default="1024,8192", help="tokens in the cache when decoding starts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1376)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=32, help="tokens to decode at each position in each round")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    shape = {name: getattr(options, name) for name in ("layers", "hidden", "intermediate", "heads")}
    results: dict[str, Any] = {
        "command": command(__file__, given),
        "machine": {**machine(), "transformers": transformers.__version__},
        "shape": {"batch": 1, **shape, "vocabulary": VOCABULARY, "dtype": "float32"},
        "method": options.method,
        "tokens_a_round": options.tokens,
        "cells": measure(options.method, shape, sorted(parse_numbers(options.positions)), options),
    }
    if options.out:
        write(options.out, results)
    show(results)


@torch.inference_mode()
def measure(method: str, shape: dict[str, int], positions: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    ours, theirs = build(method, **shape), build_llama(**shape)
    decode = decoders(ours, theirs)
    caches: dict[tuple[str, int], Any] = {}
    for position in positions:
        caches[LLAMA, position] = filled(theirs, DynamicCache(config=theirs.config), position)
        caches[EAGER, position] = caches[COMPILED, position] = filled(ours, SubquadCache(ours.config), position)
        check_agreement(decode, caches[EAGER, position])
    seconds: dict[tuple[str, int], list[float]] = {cell: [] for cell in caches}
    for _ in track(range(options.rounds), description="decoding", transient=True, console=Console(stderr=True)):
        for name, position in caches:
            seconds[name, position].append(run(decode[name], caches[name, position], options.tokens))
    if (graphs := counters["stats"]["unique_graphs"]) != 1:
        raise SystemExit(f"{method}: one step must compile once for all positions; it has compiled {graphs} times.")
    return [row(*cell, seconds) for cell in caches]


def build(method: str, layers: int, hidden: int, intermediate: int, heads: int) -> SubquadForCausalLM:
    torch.manual_seed(SEED)
    config = SubquadConfig(
        method=method,
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        position="rotary",
        norm="rms",
        hidden_act="swiglu",
        attention_bias=False,
        mlp_bias=False,
    )
    return SubquadForCausalLM(config).eval()


def build_llama(layers: int, hidden: int, intermediate: int, heads: int) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=2**17,
    )
    return LlamaForCausalLM(config).eval()


def decoders(ours: SubquadForCausalLM, theirs: LlamaForCausalLM) -> dict[str, Decode]:
    """What decodes a token, by name."""
    torch._dynamo.reset()
    counters.clear()

    def step(token: Tensor, cache: SubquadCache) -> Tensor:
        logits: Tensor = ours(token, past_key_values=cache).logits
        return logits

    def llama(token: Tensor, cache: DynamicCache) -> Tensor:
        logits: Tensor = theirs(token, past_key_values=cache).logits
        return logits

    return {LLAMA: llama, EAGER: step, COMPILED: torch.compile(step, fullgraph=True, dynamic=True)}


def tokens_at_random(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(SEED))


def filled(model: Any, cache: Any, position: int) -> Any:
    for piece in tokens_at_random(position).split(PIECE, dim=1):
        model(piece, past_key_values=cache, logits_to_keep=1)
    return cache


def check_agreement(decode: dict[str, Decode], cache: SubquadCache) -> None:
    """A compiled model that is wrong is not timed."""
    found, expected = (
        torch.cat([decode[name](torch.tensor([[token]]), own) for token in tokens_at_random(4)[0].tolist()])
        for name, own in ((COMPILED, copy.deepcopy(cache)), (EAGER, copy.deepcopy(cache)))
    )
    error = float((found - expected).norm() / expected.norm())
    if not error < 1e-4:
        raise SystemExit(f"the logits of the compiled model are off by {error:.2e}; not timed.")


def run(decode: Decode, cache: Any, tokens: int) -> float:
    """Seconds per token, decoding greedily from a copy of the cache."""
    cache, token, start = copy.deepcopy(cache), tokens_at_random(1), 0.0
    for i in range(WARM_UP + tokens):
        if i == WARM_UP:
            start = time.perf_counter()
        token = decode(token, cache)[:, -1:].argmax(-1)
    return (time.perf_counter() - start) / tokens


def row(name: str, position: int, seconds: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    own, base = seconds[name, position], seconds[LLAMA, position]
    ratios = [b / s for b, s in zip(base, own, strict=True)]
    return {
        "model": name,
        "position": position,
        "rounds": len(own),
        "tokens_per_second": round(statistics.median(1 / s for s in own), 2),
        "tokens_per_second_80_percent": [round(edge, 2) for edge in middle_80_percent([1 / s for s in own])],
        "times_llama": round(statistics.median(ratios), 3),
        "times_llama_80_percent": [round(edge, 3) for edge in middle_80_percent(ratios)],
    }


def show(results: dict[str, Any]) -> None:
    table = new_table(f"{results['method']}, token by token", "model", "position", "tokens/s", "times Llama", "80%")
    for cell in results["cells"]:
        low, high = cell["times_llama_80_percent"]
        figures = f"{cell['tokens_per_second']:.1f}", f"{cell['times_llama']:.2f}", f"{low:.2f} - {high:.2f}"
        table.add_row(cell["model"], f"{cell['position']:,}", *figures)
    Console().print(results["machine"], table)


if __name__ == "__main__":
    main()
