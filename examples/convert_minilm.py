"""Convert the sentence embedder all-MiniLM-L6-v2, repair it, and compare its embeddings with the original's.

    python examples/convert_minilm.py MODEL SENTENCES.txt --method hedgehog --out embedder

MODEL is a folder with all-MiniLM-L6-v2, or sentence-transformers/all-MiniLM-L6-v2 on the hub. SENTENCES.txt has a few hundred
sentences, one per line, similar to those that you will embed. No labels are needed: the converted model learns to reproduce the
original's hidden states. Needs the extra `convert`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import subquad as sq
from subquad.conversion import Schedule, finetune, mechanisms, transfer

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("sentences", type=Path)
    parser.add_argument("--method", default="hedgehog", help="a mechanism (hedgehog)")
    parser.add_argument("--steps", type=int, default=200, help="steps of each repair stage (200)")
    parser.add_argument("--out", type=Path, help="folder to save the repaired model to")
    options = parser.parse_args()
    if not options.sentences.is_file():
        parser.error(f"SENTENCES must be a file; {options.sentences} does not exist")

    original = AutoModel.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    lines = [line.strip() for line in options.sentences.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts, held_out = lines[BATCH:], lines[:BATCH]
    batches = [encode(tokenizer, texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]

    converted = sq.convert(original, options.method, copy=True)
    print_similarity("right after the swap", original, converted, encode(tokenizer, held_out))
    schedule = Schedule(steps=options.steps, every=max(1, options.steps // 5))
    if any(next(mechanism.parameters(), None) is not None for mechanism in mechanisms(converted).values()):
        transfer(original, converted, batches, schedule)
        print_similarity("after attention transfer", original, converted, encode(tokenizer, held_out))
    finetune(original, converted, batches, Schedule(steps=options.steps, lr=2e-3, every=schedule.every), loss="embedding")
    print_similarity("after low-rank finetuning", original, converted, encode(tokenizer, held_out))
    if options.out is not None:
        converted.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
        print(f"saved to {options.out}: subquad.load reads it")


def encode(tokenizer: Any, texts: list[str]) -> dict[str, Tensor]:
    return dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))


@torch.no_grad()
def embed(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """(B, dim): the mean of the real tokens' last hidden states, normalised to length 1."""
    states, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def print_similarity(when: str, original: Any, converted: Any, batch: dict[str, Tensor]) -> None:
    before, after = embed(original, batch), embed(converted, batch)
    pairs = torch.triu_indices(len(before), len(before), 1)
    ours, theirs = ((x @ x.T)[pairs[0], pairs[1]] for x in (after, before))
    agreement = torch.corrcoef(torch.stack([ours, theirs]))[0, 1]
    print(f"{when}: cosine to the original's embeddings {float((before * after).sum(-1).mean()):.4f}, ", end="")
    print(f"correlation of pairwise similarities {float(agreement):.4f}")


if __name__ == "__main__":
    main()
