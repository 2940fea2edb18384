"""Text that a language model generates itself: as much as a repair needs, if there is little other text.

Each sequence begins with the token that starts a text, and each next token is sampled from the model's own distribution. Every
finished piece is written to a file, so that a second start generates only what is missing.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import subquad as sq
from benchmarks.pretrained import Pretrained
from subquad.runs.files import write_atomically

PIECE = 128  # sequences


def generate_text(read: Pretrained, sequences: int, length: int, folder: Path) -> Tensor:
    """(sequences, length) tokens; the pieces are kept in `folder`."""
    model = sq.convert(read.model, "softmax", copy=True)  # for its cache, which grows without being copied at each token
    pieces = [_piece(model, read.tokenizer.bos_token_id, i, length, folder) for i in range(-(-sequences // PIECE))]
    return torch.cat(pieces)[:sequences]


def _piece(model: Any, start: int, index: int, length: int, folder: Path) -> Tensor:
    path = folder / f"generated-{length}-{index}.pt"
    if not path.exists():
        content = io.BytesIO()
        torch.save(_sample(model, start, length, torch.Generator().manual_seed(index)), content)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())
    tokens: Tensor = torch.load(path, weights_only=True)
    return tokens


@torch.inference_mode()
def _sample(model: Any, start: int, length: int, generator: torch.Generator) -> Tensor:
    tokens, cache = [torch.full((PIECE, 1), start)], None
    while len(tokens) < length:
        out = model(tokens[-1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        below = out.logits[:, -1].softmax(-1).cumsum(-1)  # (PIECE, words)
        drawn = torch.rand(PIECE, 1, generator=generator) * below[:, -1:]
        tokens.append(torch.searchsorted(below, drawn).clamp(max=below.shape[-1] - 1))
    return torch.cat(tokens, dim=1)
