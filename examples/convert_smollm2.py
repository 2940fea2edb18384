"""Convert SmolLM2, repair it on a text, and generate from it in constant memory.

    python examples/convert_smollm2.py MODEL TEXT.txt --window 256 --prompt "The history of science"

MODEL is a folder with SmolLM2-135M, or HuggingFaceTB/SmolLM2-135M on the hub; with --gguf, a folder with that GGUF file. Any
other causal language model that subquad can convert works, too. Needs the extra `convert`, and for GGUF files the package gguf.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import subquad as sq
from subquad.conversion import Schedule, finetune, transfer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--gguf", help="a GGUF file in the folder")
    parser.add_argument("--window", type=int, default=256, help="tokens within which attention stays exact (256)")
    parser.add_argument("--length", type=int, default=512, help="tokens per training sequence (512)")
    parser.add_argument("--steps", type=int, default=40, help="steps of each repair stage (40)")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=60, help="tokens to generate (60)")
    options = parser.parse_args()
    if not options.text.is_file():
        parser.error(f"TEXT must be a file; {options.text} does not exist")

    where = {"gguf_file": options.gguf} if options.gguf else {}
    original = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, **where).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model, **where)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    rows = ids[: len(ids) // options.length * options.length].view(-1, options.length)
    batches = [{"input_ids": row[None]} for row in rows]
    evaluation, training = batches[:2], batches[2:]

    window = sq.convert(original, sq.Local(window=options.window), copy=True)
    print_perplexity("the window alone", original, window, evaluation)
    converted = sq.convert(original, sq.Hybrid(window=options.window), copy=True)
    print_perplexity("hybrid, right after the swap", original, converted, evaluation)
    every = max(1, options.steps // 4)
    transfer(original, converted, training, Schedule(steps=options.steps, lr=2e-2, every=every))
    print_perplexity("after attention transfer", original, converted, evaluation)
    finetune(original, converted, training, Schedule(steps=options.steps, lr=1e-3, every=every), loss="distil")
    print_perplexity("after low-rank finetuning", original, converted, evaluation)

    prompt = tokenizer(options.prompt, return_tensors="pt")
    for name, model in (("original", original), ("converted", converted)):
        started = time.perf_counter()
        found: Any = model.generate(
            **prompt, max_new_tokens=options.tokens, do_sample=False, return_dict_in_generate=True,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        written = found.sequences.shape[1] - prompt["input_ids"].shape[1]
        print(f"\n{name}, {written / seconds:.1f} tokens per second, cache of {cache_bytes(found.past_key_values):,} bytes:")
        print(tokenizer.decode(found.sequences[0], skip_special_tokens=True))


def print_perplexity(when: str, original: Any, converted: Any, batches: list[dict[str, torch.Tensor]]) -> None:
    found = sq.diagnose(original, converted, batches)
    assert found.loss_before is not None
    assert found.loss_after is not None
    print(f"{when}: perplexity {math.exp(found.loss_after):.2f} (original: {math.exp(found.loss_before):.2f})")


def cache_bytes(cache: Any) -> int:
    """The size of a cache in bytes."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


if __name__ == "__main__":
    main()
