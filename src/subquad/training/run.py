"""The training of one method in this process, from its first step or its last checkpoint to its test score."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch

from subquad.errors import InputError, SubquadError
from subquad.registry import options_of
from subquad.runs import checkpoints
from subquad.runs.determinism import deterministic
from subquad.runs.memory import PeakMemory
from subquad.runs.progress import no_transformers_bars
from subquad.tasks.base import Splits, Task
from subquad.tasks.rows import row_count, row_lengths
from subquad.training.data import Batches, fingerprint
from subquad.training.plan import Plan, count_steps, data_folder
from subquad.training.results import Record
from subquad.training.trainer import DivergedError, Job, MethodTrainer, score


class LostProcessError(SubquadError):
    """Another process of the run has ended, or cannot be reached."""


def processes() -> int:
    """How many processes `torchrun` or `accelerate launch` has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process() -> int:
    """Which of them this is."""
    return int(os.environ.get("RANK", "0"))


def read_data(plan: Plan, task: Task, known: str = "") -> Splits:
    """The rows of a run; refused if `known`, the fingerprint of those that it began with, is another."""
    with deterministic(plan.threads):
        torch.manual_seed(plan.settings.seed)
        splits = task.load(data_folder(plan.data), plan.settings)
    if plan.eval_rows is not None and plan.eval_rows > row_count(splits.valid):
        raise InputError(
            f"eval_rows must be at most {row_count(splits.valid):,}, the number of validation rows; got {plan.eval_rows:,}. "
            "Pass fewer, or leave it out."
        )
    if plan.settings.label_smoothing and splits.collate([splits.valid[0]])["labels"].is_floating_point():
        raise InputError(
            f"label_smoothing must be 0 for a regression task, whose labels are not classes; "
            f"got {plan.settings.label_smoothing}."
        )
    if known and fingerprint(splits) != known:
        where = data_folder(plan.data) or task.info.source if task.reads_folder(plan.settings) else "this machine"
        raise InputError(
            f"all methods of a run must use the same rows; those of {where} have changed since it began. Pass the original "
            "data with --data, choose another --out, or start over with --fresh."
        )
    return splits


def train_method(job: Job) -> Record:
    """Train one method, from a checkpoint in its folder if there is one; the record says how it ended.

    Disk errors and lost processes are raised, because they affect all methods.
    """
    name, options = job.mechanism.info.name, options_of(job.mechanism)
    record = Record(name, options, "running", processes=processes(), threads=job.plan.threads, data=fingerprint(job.splits))
    try:
        with deterministic(job.plan.threads), no_transformers_bars():
            _train(job, record)
    except DivergedError as error:
        record.status, record.why = "diverged", str(error)
    except checkpoints.SaveError as error:
        record.status, record.why = "failed", str(error)
        raise
    except SubquadError as error:
        record.status, record.why = "refused", str(error)
    except Exception as error:
        said = "out of memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}".splitlines()[0]
        record.status, record.why = "failed", said
        if record.processes > 1:
            raise LostProcessError(
                f"process {process()} of {record.processes} cannot continue {record.method} at step {record.step}: {said}. "
                "Most likely another process has ended. Start all of them again with --resume."
            ) from error
    finally:
        with contextlib.suppress(Exception):  # a failing callback must not hide the error above
            job.on_record(record)
    return record


def _train(job: Job, record: Record) -> None:
    plan, task, splits, folder = job.plan, job.task, job.splits, job.folder
    settings, begun = plan.settings, time.monotonic()
    is_first = process() == 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints.clean_up(folder)
    record.steps = count_steps(settings, row_count(splits.train))
    peak = PeakMemory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(settings.seed)
    model = task.model(job.mechanism, settings)
    kind: Any = type(model)  # FSDP changes the class
    record.parameters = sum(p.numel() for p in model.parameters())
    job.on_record(record)
    rows, share = row_count(splits.train), (process(), record.processes)
    batches = Batches(rows, settings.batch, record.steps, settings.seed, *share, row_lengths(splits.train))
    trainer = MethodTrainer(job, model, record, batches, peak)
    trainer.accelerator.wait_for_everyone()  # until the first process has cleaned up
    newest = checkpoints.latest(folder)
    trainer.require_same_checkpoint(newest)
    if newest is not None:
        trainer.restore_record(newest)
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    if trainer.state.global_step < record.steps:
        record.status = "stopped"
        return
    if not is_first:
        return
    best = kind.from_pretrained(folder / checkpoints.BEST).to(model.device)
    with peak.paused():
        record.test = score(best, job, splits.test)
    record.seconds = trainer.before + time.monotonic() - begun
    record.status = "done"
