"""Translate numbers from English into German words with an encoder-decoder.

    python examples/translation.py
    python examples/translation.py --method performer --cross-method linear --beams 4
    python examples/translation.py --reverse

German puts the ones before the tens (four-and-twenty), so the order of words changes. The program prints the training loss, a
few translations of held-out numbers, and the share of them that match exactly.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from subquad.models import SubquadConfig, SubquadForConditionalGeneration

ENGLISH = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand""".split()  # noqa: SIM905
GERMAN = """
    null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn
    neunzehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig hundert tausend ein und""".split()  # noqa: SIM905
PAD, START, END = range(3)
WORDS = ["", "", "", *ENGLISH, *GERMAN]
IDS = {word: i for i, word in enumerate(WORDS) if word}


def english(n: int) -> list[str]:
    for size, word in ((1000, "thousand"), (100, "hundred")):
        if n >= size:
            return [*english(n // size), word, *(english(n % size) if n % size else [])]
    return [ENGLISH[n]] if n < 20 else [ENGLISH[18 + n // 10], *(english(n % 10) if n % 10 else [])]


def german(n: int, one: str = "eins") -> list[str]:
    for size, word in ((1000, "tausend"), (100, "hundert")):
        if n >= size:
            return [*german(n // size, "ein"), word, *(german(n % size, one) if n % size else [])]
    if n < 20:
        return [one if n == 1 else GERMAN[n]]
    return [*([*german(n % 10, "ein"), "und"] if n % 10 else []), GERMAN[18 + n // 10]]


def padded(sentences: list[list[str]]) -> Tensor:
    """(B, N) ids: each row has its words, END, and then PAD."""
    return pad_sequence([torch.tensor([*(IDS[w] for w in words), END]) for words in sentences], True, PAD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="linear", help="the mechanism of self-attention in encoder and decoder (linear)")
    parser.add_argument("--cross-method", default="softmax", help="the mechanism of cross-attention (softmax)")
    parser.add_argument("--reverse", action="store_true", help="translate from German into English")
    parser.add_argument("--beams", type=int, default=1, help="number of beams; 1 is greedy search (1)")
    parser.add_argument("--steps", type=int, default=400, help="training steps (400)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    draw = random.Random(args.seed)
    numbers = list({draw.randrange(10 ** draw.randint(1, 6)) for _ in range(20_000)})
    draw.shuffle(numbers)
    held_out, numbers = numbers[:500], numbers[500:]
    read, write, gap = (german, english, " ") if args.reverse else (english, german, "")
    config = SubquadConfig(
        vocab_size=len(WORDS),
        method=args.method,
        cross_method=args.cross_method,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=START,
    )
    model = SubquadForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=args.steps)
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        rows = draw.sample(numbers, 64)
        source, target = padded([read(n) for n in rows]), padded([write(n) for n in rows])
        loss = model(source, attention_mask=source != PAD, labels=target.masked_fill(target == PAD, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == args.steps:
            print(f"step {step:5}  loss {loss.item():.3f}  {time.perf_counter() - start:.0f} s", flush=True)

    model.eval()
    source = padded([read(n) for n in held_out])
    written = model.generate(source, attention_mask=source != PAD, num_beams=args.beams, max_new_tokens=24)
    translations = [gap.join(WORDS[i] for i in row if i > END) for row in written.tolist()]
    for n, translation in list(zip(held_out, translations, strict=True))[:5]:
        print(f"sample {n}: {' '.join(read(n))} -> {translation}")
    right = sum(t == gap.join(write(n)) for n, t in zip(held_out, translations, strict=True))
    print(f"exact match {right / len(held_out):.3f} of {len(held_out)} held out")


if __name__ == "__main__":
    main()
