"""A byte-level language model with any causal mechanism inside.

    python examples/character_lm.py
    python examples/character_lm.py --method linear --steps 300 my_text.txt

Without a file, it trains on the sources of Python's standard library. It prints the training loss in nats per byte, the loss on
held-out text, a sample, and the size of the cache after the sample. That size is constant with linear and bounded with local,
so the sample may be as long as you like.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from subquad.models import SubquadCache, SubquadConfig, SubquadForCausalLM

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path, nargs="?", help="text to train on")
parser.add_argument("--method", default="linear, local every 2nd layer", help="the mechanism of self-attention")
parser.add_argument("--steps", type=int, default=400, help="training steps (400)")
parser.add_argument("--length", type=int, default=256, help="bytes in a training sequence (256)")
parser.add_argument("--sample", type=int, default=400, help="bytes to generate (400)")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)

paths = [args.file] if args.file else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in paths)[:1_000_000]), dtype=torch.uint8)
train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def batch(text: Tensor, rows: int) -> Tensor:
    """(rows, length): pieces from random positions."""
    starts = torch.randint(len(text) - args.length + 1, (rows, 1))
    return text[starts + torch.arange(args.length)].long()


sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
model = SubquadForCausalLM(SubquadConfig(vocab_size=256, method=args.method, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=args.steps)
for step in range(1, args.steps + 1):
    ids = batch(train, rows=8)
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 50 == 0 or step == args.steps:
        print(f"step {step:5}  loss {loss.item():.3f}", flush=True)

model.eval()
ids = batch(held_out, rows=64)
print(f"held-out loss {model(ids, labels=ids).loss.item():.3f} nats per byte")
prompt, cache = torch.tensor([list(b"    def ")]), SubquadCache(model.config)
written = model.generate(prompt, past_key_values=cache, max_new_tokens=args.sample, do_sample=True, temperature=0.7)
print(f"sample:\n{bytes(written[0].tolist()).decode(errors='replace')}")
print(f"cache: {cache.nbytes:,} bytes after {cache.get_seq_length()} tokens")
