"""Repairing a converted model, in stages, each of them optional and resumable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from subquad.conversion.diagnosis import require_pair, require_tokens
from subquad.conversion.observe import Batch, watchable
from subquad.conversion.repair.alignment import Align
from subquad.conversion.repair.attention import Transfer
from subquad.conversion.repair.keep import Kept, keep_softmax
from subquad.conversion.repair.loop import Progress, Schedule, Tell, learn
from subquad.conversion.repair.lora import Lora, Loss
from subquad.conversion.repair.low_rank import LowRank, Targets

__all__ = ["Kept", "Progress", "Schedule", "align", "finetune", "keep_softmax", "transfer"]

TRANSFER = Schedule(steps=300, lr=1e-2)
ALIGN = Schedule(steps=300, lr=1e-3)
FINETUNE = Schedule(steps=300, lr=1e-3)


def transfer(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Sequence[Batch],
    schedule: Schedule = TRANSFER,
    *,
    folder: Path | None = None,
    tell: Tell = lambda progress: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Progress:
    """Attention transfer: the new maps of `converted` learn what `original`'s attention gives. See `Transfer`.

    Args:
        folder: for checkpoints; the same call goes on from one.
        tell: called after each step.
        is_stopping: asked after each step.
    """
    require_tokens(batches)
    require_pair(original, converted)
    with watchable(original) as teacher:
        return learn(Transfer(teacher, converted), batches, schedule, folder=folder, tell=tell, is_stopping=is_stopping)


def align(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Sequence[Batch],
    schedule: Schedule = ALIGN,
    *,
    rank: int = 8,
    targets: Targets = "attention",
    folder: Path | None = None,
    tell: Tell = lambda progress: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Progress:
    """Low-rank finetuning of each attention, or layer, by itself, merged into the weights at the end. See `Align`.

    Args:
        rank: of the changes.
        targets: what changes, and what gives the original's output: each attention, or "all" of each layer.
    """
    require_tokens(batches)
    require_pair(original, converted)
    with watchable(original) as teacher:
        return _learnt(Align(teacher, converted, rank, targets), batches, schedule, folder, tell, is_stopping)


def finetune(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Sequence[Batch],
    schedule: Schedule = FINETUNE,
    *,
    loss: Loss | None = None,
    rank: int = 8,
    targets: Targets = "attention",
    folder: Path | None = None,
    tell: Tell = lambda progress: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Progress:
    """Low-rank finetuning of `converted`, merged into its weights at the end. See `Lora`.

    Args:
        loss: "language", "distil" or "embedding"; by default the first for causal language models, the last for others.
        rank: of the changes.
        targets: what changes: the projections of attention, or "all" linear maps of the layers.
    """
    require_tokens(batches)
    require_pair(original, converted)
    was_training = original.training
    stage = Lora(original.eval(), converted, loss, rank, targets)
    try:
        return _learnt(stage, batches, schedule, folder, tell, is_stopping)
    finally:
        original.train(was_training)


def _learnt(
    stage: LowRank,
    batches: Sequence[Batch],
    schedule: Schedule,
    folder: Path | None,
    tell: Tell,
    is_stopping: Callable[[], bool],
) -> Progress:
    try:
        return learn(stage, batches, schedule, folder=folder, tell=tell, is_stopping=is_stopping)
    finally:
        stage.merge()
