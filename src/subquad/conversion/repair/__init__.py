"""Repairing a converted model, in stages, each of them optional and resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from subquad.conversion.activations import Batch, watchable
from subquad.conversion.diagnosis import require_pair, require_tokens
from subquad.conversion.repair.alignment import Align
from subquad.conversion.repair.attention import Transfer
from subquad.conversion.repair.keep import Kept, keep_softmax
from subquad.conversion.repair.loop import Schedule, StageProgress, Tell, learn
from subquad.conversion.repair.lora import Lora, Loss
from subquad.conversion.repair.low_rank import RANK, LowRank, Targets
from subquad.errors import InputError

__all__ = ["Kept", "Schedule", "StageProgress", "align", "finetune", "keep_softmax", "transfer"]

_USUAL = Schedule()


def transfer(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[Batch],
    schedule: Schedule = _USUAL,
    *,
    folder: str | Path | None = None,
    tell: Tell = lambda progress: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> StageProgress:
    """Attention transfer: the new maps of `converted` learn what `original`'s attention gives. See `Transfer`.

    Args:
        batches: inputs of the model, such as {"input_ids": …}; some are held out, see `Schedule`.
        folder: for checkpoints; the same call goes on from one.
        tell: called after each step with the progress.
        is_stopping: asked after each step; True writes a checkpoint and returns.
    """
    batches = _required(original, converted, batches, schedule)
    with watchable(original) as teacher:
        return learn(Transfer(teacher, converted), batches, schedule, folder=folder, tell=tell, is_stopping=is_stopping)


def align(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[Batch],
    schedule: Schedule = _USUAL,
    *,
    rank: int = RANK,
    targets: Targets = "attention",
    folder: str | Path | None = None,
    tell: Tell = lambda progress: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> StageProgress:
    """Low-rank finetuning of each attention, or layer, by itself, merged into the weights at the end. See `Align`.

    Args as in `transfer`, and:
        rank: of the changes.
        targets: what changes, and what gives the original's output: each attention, or "all" of each layer.
    """
    batches = _required(original, converted, batches, schedule)
    with watchable(original) as teacher:
        return _learnt(Align(teacher, converted, rank, targets), batches, schedule, folder, tell, is_stopping)


def finetune(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[Batch],
    schedule: Schedule = _USUAL,
    *,
    loss: Loss | None = None,
    rank: int = RANK,
    targets: Targets = "attention",
    folder: str | Path | None = None,
    tell: Tell = lambda progress: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> StageProgress:
    """Low-rank finetuning of `converted`, merged into its weights at the end. See `Lora`.

    Args as in `transfer`, and:
        loss: "language", "distil" or "embedding"; by default the first for causal language models, the last for others.
        rank: of the changes.
        targets: what changes: the projections of attention, or "all" linear maps of the layers.
    """
    batches = _required(original, converted, batches, schedule)
    was_training = original.training
    stage = Lora(original.eval(), converted, loss, rank, targets)
    try:
        return _learnt(stage, batches, schedule, folder, tell, is_stopping)
    finally:
        original.train(was_training)


def _required(
    original: PreTrainedModel, converted: PreTrainedModel, batches: Iterable[Batch], schedule: Schedule
) -> Sequence[Batch]:
    """The batches, if a repair can be made of all this."""
    if not isinstance(schedule, Schedule):
        raise InputError(f"the schedule of a stage is a Schedule, such as Schedule(steps=300); got {schedule!r}.")
    found = batches if isinstance(batches, Sequence) else list(batches)
    require_tokens(found)
    require_pair(original, converted)
    return found


def _learnt(
    stage: LowRank,
    batches: Sequence[Batch],
    schedule: Schedule,
    folder: str | Path | None,
    tell: Tell,
    is_stopping: Callable[[], bool],
) -> StageProgress:
    try:
        return learn(stage, batches, schedule, folder=folder, tell=tell, is_stopping=is_stopping)
    finally:
        stage.merge()
