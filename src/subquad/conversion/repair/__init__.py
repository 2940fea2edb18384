"""Repair of a converted model, in stages. Each is optional, and can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from subquad.conversion.activations import Batch, recordable
from subquad.conversion.diagnosis import require_pair, require_tokens
from subquad.conversion.repair.alignment import Align
from subquad.conversion.repair.attention_transfer import Transfer
from subquad.conversion.repair.keep_search import Kept, keep_softmax
from subquad.conversion.repair.loop import OnStageProgress, train
from subquad.conversion.repair.lora import Lora, Loss
from subquad.conversion.repair.low_rank import RANK, LowRank, Targets
from subquad.conversion.repair.schedule import Schedule, StageProgress
from subquad.errors import InputError

__all__ = ["Kept", "Schedule", "StageProgress", "align", "finetune", "keep_softmax", "transfer"]

_DEFAULT = Schedule()


def transfer(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[Batch],
    schedule: Schedule = _DEFAULT,
    *,
    folder: str | Path | None = None,
    on_progress: OnStageProgress = lambda progress: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> StageProgress:
    """Attention transfer: the mechanisms of `converted` learn the output of `original`'s attention. See `Transfer`.

    Args:
        batches: inputs of the model, such as {"input_ids": …}; some are held out, see `Schedule`.
        folder: for checkpoints; the same call resumes from one.
        on_progress: called with a `StageProgress` after each step.
        is_stopping: called after each step; True writes a checkpoint and returns.
    """
    batches = _checked(original, converted, batches, schedule)
    with recordable(original) as teacher:
        stage = Transfer(teacher, converted)
        return train(stage, batches, schedule, folder=folder, on_progress=on_progress, is_stopping=is_stopping)


def align(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[Batch],
    schedule: Schedule = _DEFAULT,
    *,
    rank: int = RANK,
    targets: Targets = "attention",
    folder: str | Path | None = None,
    on_progress: OnStageProgress = lambda progress: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> StageProgress:
    """Low-rank finetuning of each attention, or layer, on its own, merged into the weights at the end. See `Align`.

    Args as in `transfer`, and:
        rank: of the changes.
        targets: what changes, and whose output is matched: each attention, or "all" of each layer.
    """
    batches = _checked(original, converted, batches, schedule)
    with recordable(original) as teacher:
        return _train_low_rank(Align(teacher, converted, rank, targets), batches, schedule, folder, on_progress, is_stopping)


def finetune(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[Batch],
    schedule: Schedule = _DEFAULT,
    *,
    loss: Loss | None = None,
    rank: int = RANK,
    targets: Targets = "attention",
    folder: str | Path | None = None,
    on_progress: OnStageProgress = lambda progress: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> StageProgress:
    """Low-rank finetuning of `converted`, merged into its weights at the end. See `Lora`.

    Args as in `transfer`, and:
        loss: "language", "distil" or "embedding"; by default the first for causal language models, the last for others.
        rank: of the changes.
        targets: what changes: the projections of attention, or "all" linear maps of the layers.
    """
    batches = _checked(original, converted, batches, schedule)
    was_training = original.training
    stage = Lora(original.eval(), converted, loss, rank, targets)
    try:
        return _train_low_rank(stage, batches, schedule, folder, on_progress, is_stopping)
    finally:
        original.train(was_training)


def _checked(
    original: PreTrainedModel, converted: PreTrainedModel, batches: Iterable[Batch], schedule: Schedule
) -> Sequence[Batch]:
    """The batches, if the arguments fit together."""
    if not isinstance(schedule, Schedule):
        raise InputError(f"schedule must be a Schedule, such as Schedule(steps=300); got {schedule!r}.")
    found = batches if isinstance(batches, Sequence) else list(batches)
    require_tokens(found)
    require_pair(original, converted)
    return found


def _train_low_rank(
    stage: LowRank,
    batches: Sequence[Batch],
    schedule: Schedule,
    folder: str | Path | None,
    on_progress: OnStageProgress,
    is_stopping: Callable[[], bool],
) -> StageProgress:
    try:
        return train(stage, batches, schedule, folder=folder, on_progress=on_progress, is_stopping=is_stopping)
    finally:
        stage.merge()
