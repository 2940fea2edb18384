"""One method from its first step, or from its last checkpoint, to its test score, in this process."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch

from subquad.errors import InputError, SubquadError
from subquad.registry import options_of
from subquad.runs import checkpoints
from subquad.runs.determinism import deterministic, quiet
from subquad.runs.memory import Peak
from subquad.tasks.base import Splits, Task
from subquad.tasks.rows import length, lengths_of
from subquad.training.data import Batches, fingerprint
from subquad.training.plan import Plan, data_folder, steps_of
from subquad.training.results import Record
from subquad.training.trainer import DivergedError, Job, MethodTrainer, scored


class LostError(SubquadError):
    """Another process of the run has ended, or cannot be reached."""


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def process() -> int:
    return int(os.environ.get("RANK", "0"))


def read_data(plan: Plan, task: Task, known: str = "") -> Splits:
    """The rows of a run; refused where they are others than those of the fingerprint that is `known`."""
    with deterministic(plan.threads):
        torch.manual_seed(plan.settings.seed)
        splits = task.load(data_folder(plan.data), plan.settings)
    if plan.eval_rows is not None and plan.eval_rows > length(splits.valid):
        raise InputError(
            f"eval_rows is at most {length(splits.valid):,}, as many as there are validation rows; got {plan.eval_rows:,}. "
            "Choose fewer, or leave it out."
        )
    if plan.settings.label_smoothing and splits.collate([splits.valid[0]])["labels"].is_floating_point():
        raise InputError("label_smoothing is for classes, and the labels of this task are numbers. Set it to 0.")
    if known and fingerprint(splits) != known:
        where = data_folder(plan.data) or task.info.source if task.reads_folder(plan.settings) else "this machine"
        raise InputError(
            f"a table is of one set of rows; those that {where} has now are others than it began with. Name the data that it "
            "began with by --data, choose another --out, or start over with --fresh."
        )
    return splits


def run(job: Job) -> Record:
    """Do it, going on from a checkpoint in its folder if there is one; the record tells how it ended.

    Disk errors and lost processes are raised: they concern all methods.
    """
    name, options = job.config.info.name, options_of(job.config)
    record = Record(name, options, "running", processes=processes(), threads=job.plan.threads, data=fingerprint(job.splits))
    try:
        with deterministic(job.plan.threads), quiet():
            _run(job, record)
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
            raise LostError(
                f"process {process()} of {record.processes} cannot go on with {record.method}, step {record.step}: {said}. "
                "Most likely another process has ended. Start all of them again with --resume."
            ) from error
    finally:
        with contextlib.suppress(Exception):  # what is to be told must not hide what happened
            job.tell(record)
    return record


def _run(job: Job, record: Record) -> None:
    plan, task, splits, folder = job.plan, job.task, job.splits, job.folder
    settings, begun = plan.settings, time.monotonic()
    is_first = process() == 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints.tidy(folder)
    record.steps = steps_of(settings, length(splits.train))
    peak = Peak(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(settings.seed)
    model = task.model(job.config, settings)
    kind: Any = type(model)  # FSDP makes another class of it
    record.parameters = sum(p.numel() for p in model.parameters())
    job.tell(record)
    rows, share = length(splits.train), (process(), record.processes)
    batches = Batches(rows, settings.batch, record.steps, settings.seed, *share, lengths_of(splits.train))
    trainer = MethodTrainer(job, model, record, batches, peak)
    trainer.accelerator.wait_for_everyone()  # until the first has tidied up
    newest = checkpoints.latest(folder)
    trainer.require_same(newest)
    if newest is not None:
        trainer.remember(newest)
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    if trainer.state.global_step < record.steps:
        record.status = "stopped"
        return
    if not is_first:
        return
    best = kind.from_pretrained(folder / checkpoints.BEST).to(model.device)
    with peak.paused():
        record.test = scored(best, job, splits.test)
    record.seconds = trainer.before + time.monotonic() - begun
    record.status = "done"
