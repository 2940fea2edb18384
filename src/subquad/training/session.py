"""`train`: all methods of a run, one after the other."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from subquad.errors import InputError, SubquadError
from subquad.families.base import Mechanism
from subquad.registry import module_of
from subquad.runs.lock import exclusive
from subquad.runs.precision import Precision
from subquad.runs.progress import Progress
from subquad.runs.stop import StopRequest
from subquad.tasks.base import Settings, Task
from subquad.training.folder import RunFolder
from subquad.training.plan import Plan, check_plan, choose_methods, class_path
from subquad.training.results import FILE, UNFINISHED, Record, Results, save
from subquad.training.run import LostProcessError, process, processes, read_data, train_method
from subquad.training.trainer import Job
from subquad.training.worker import train_in_worker

OnRecord = Callable[[Record], None]
Trainer = Callable[[Mechanism, Path, OnRecord], Record]  # trains one method
_TIMEOUT = timedelta(hours=1)  # for processes that wait while the first one scores
_SAVE_INTERVAL = 1.0  # seconds between two writes of results in which only the step has changed


@dataclass(frozen=True)
class TrainingProgress(Progress):
    """How far a run is: `fraction` and `seconds_left` are of all methods, `record` is that of the one in training."""

    record: Record = field(kw_only=True)


def train(
    task: Task,
    methods: Sequence[str | Mechanism],
    settings: Settings | None = None,
    out: Path = Path("subquad-train"),
    *,
    precision: Precision = "fp32",
    checkpointing: bool = False,
    eval_every: int | None = None,
    save_every: int | None = None,
    eval_rows: int | None = None,
    threads: int | None = None,
    data: str | None = None,
    resume: bool = False,
    fresh: bool = False,
    in_worker: bool = True,
    on_progress: Callable[[TrainingProgress], object] = lambda progress: None,
) -> Results:
    """Train `methods` on `task`, and return their records.

    Args:
        methods: names or mechanisms; `["all"]` for every one that can do the task.
        settings: by default the task's own.
        out: the folder of the run. Methods that it already has, finished and with the same settings, are not trained again.
        precision: "fp32", or "bf16" for autocast.
        checkpointing: recompute blocks in the backward pass rather than keep their activations.
        eval_every, save_every: steps between evaluations and between checkpoints; by default a fifth and a tenth of all steps.
        eval_rows: validation rows of an evaluation; by default chosen so that evaluations take about a twentieth of the run.
        data: folder with local copies of data; by default SUBQUAD_DATA, or the public source. Tasks without data refuse it.
        resume: continue what is unfinished in `out`.
        fresh: remove the run in `out`, and start over.
        in_worker: train each method in a worker process. Under `torchrun` or `accelerate launch` the processes that those
            start do the work themselves.
        on_progress: called every few steps.

    Raises KeyboardInterrupt after Ctrl-C or SIGTERM, once the checkpoint is written.
    """
    in_worker = in_worker and processes() == 1
    _require_arguments(task, methods, in_worker)
    plan = Plan(
        task=class_path(task), settings=settings or task.info.defaults, precision=precision, checkpointing=checkpointing,
        eval_every=eval_every, save_every=save_every, eval_rows=eval_rows, threads=threads or torch.get_num_threads(),
        data=data,
    )  # fmt: skip
    check_plan(plan, task, processes())
    mechanisms, refused = choose_methods(task, methods, plan.settings)
    folder = RunFolder(Path(out), task, plan, mechanisms, refused, resume, fresh)
    if processes() > 1:
        return _train_distributed(folder, on_progress)
    if in_worker:
        for mechanism in mechanisms.values():
            module_of(mechanism)  # refuses those that a worker cannot import
    with exclusive(folder.path, "training") as lock, StopRequest() as stop:
        results = folder.open()
        session = _Session(folder, results, on_progress, is_writer=True)
        trainer = _worker_trainer(plan, stop, lock, results) if in_worker else _local_trainer(plan, task, stop, results)
        for mechanism in session.due():
            session.train(trainer, mechanism)
            if stop.requested:
                raise KeyboardInterrupt
    return results


def _require_arguments(task: Task, methods: Sequence[str | Mechanism], in_worker: bool) -> None:
    if not isinstance(task, Task):
        raise InputError(f"task must be a Task, such as subquad.tasks.TASKS['digits'](); got {task!r}.")
    if isinstance(methods, str | Mechanism):
        raise InputError(f"methods must be a list of names or mechanisms; got {methods!r}. Pass [{methods!r}].")
    kind = type(task)
    if in_worker and (kind.__module__ == "__main__" or "<locals>" in kind.__qualname__):
        raise InputError(
            f"a worker process must be able to import the task; got {kind.__qualname__}, which is defined in a script, a "
            "notebook or a function. Move it to a module, or pass in_worker=False."
        )


def _worker_trainer(plan: Plan, stop: StopRequest, lock: int | None, results: Results) -> Trainer:
    return lambda mechanism, folder, on_record: train_in_worker(plan, mechanism, folder, on_record, stop, lock, results.data)


def _local_trainer(plan: Plan, task: Task, stop: StopRequest, results: Results) -> Trainer:
    splits = read_data(plan, task, results.data)
    return lambda mechanism, folder, on_record: train_method(
        Job(plan, task, splits, mechanism, folder, on_record, lambda: stop.requested)
    )


def _train_distributed(folder: RunFolder, on_progress: Callable[[TrainingProgress], object]) -> Results:
    """One of several processes that all call `train`; the first writes, and decides whether there is anything to do."""
    from accelerate import DistributedType, PartialState

    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=_TIMEOUT)
    is_lost = False
    try:
        if state.distributed_type == DistributedType.MULTI_CPU and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
            raise InputError(
                "FSDP needs GPUs: on CPUs accelerate would silently give each process a copy of the model. Leave it out."
            )
        with contextlib.ExitStack() as held, StopRequest() as stop:

            def open_folder() -> Results:
                held.enter_context(exclusive(folder.path, "training"))
                return folder.open()

            results = _from_first_process(open_folder)
            session = _Session(folder, results, on_progress, is_writer=process() == 0)
            trainer = _local_trainer(folder.plan, folder.task, stop, results)
            for mechanism in session.due():
                try:
                    session.train(trainer, mechanism)
                except LostProcessError:
                    is_lost = True
                    stop.keep_handlers()
                    raise
                if session.is_stopped:
                    raise KeyboardInterrupt
            return results
    finally:
        if not is_lost:  # destroying the group waits for all of its processes
            state.destroy_process_group()


def _from_first_process(decide: Callable[[], Results]) -> Results:
    """The first process's result of `decide`, in all processes; its refusal is raised in all of them, too."""
    sent: list[Any] = [None]
    if process() == 0:
        try:
            sent = [decide()]
        except SubquadError as error:
            sent = [error]
    torch.distributed.broadcast_object_list(sent, 0)
    if isinstance(sent[0], SubquadError):
        raise sent[0]
    results: Results = sent[0]
    return results


class _Session:
    """One start of a run: trains what is due, saves its records, and reports progress."""

    def __init__(
        self, folder: RunFolder, results: Results, on_progress: Callable[[TrainingProgress], object], is_writer: bool
    ) -> None:
        self.folder, self.results, self.on_progress, self.is_writer = folder, results, on_progress, is_writer
        self.is_stopped = False
        self._saved, self._saved_at = ("", "", 0), 0.0
        self._begun: tuple[float, float] | None = None  # the time of the first steps, and the fraction done by then

    def due(self) -> list[Mechanism]:
        waiting = (*UNFINISHED, "waiting")
        return [self.folder.mechanisms[r.method] for r in self._records() if r.status in waiting]

    def train(self, trainer: Trainer, mechanism: Mechanism) -> None:
        record = trainer(mechanism, self.folder.path / mechanism.info.name, self._on_record)
        self.is_stopped = record.status == "stopped"

    def _records(self) -> list[Record]:
        return [r for r in map(self.results.record, self.folder.mechanisms) if r is not None]

    def _on_record(self, record: Record) -> None:
        self.results.put(record)
        state = (record.method, record.status, len(record.evals))
        if self.is_writer and (state != self._saved or time.monotonic() > self._saved_at + _SAVE_INTERVAL):
            save(self.results, self.folder.path / FILE)
            self._saved, self._saved_at = state, time.monotonic()
        self.on_progress(self._progress(record))

    def _progress(self, record: Record) -> TrainingProgress:
        waiting = (*UNFINISHED, "waiting")
        parts = [r.step / (r.steps or 1) if r.status in waiting else 1.0 for r in self._records()]
        fraction = sum(parts) / len(parts)
        if self._begun is None and record.step:
            self._begun = time.monotonic(), fraction
        since, before = self._begun or (0.0, fraction)
        is_moving = fraction > before
        left = (time.monotonic() - since) * (1 - fraction) / (fraction - before) if is_moving else None
        loss = "" if record.loss is None else f", loss {record.loss:.3g}"
        return TrainingProgress(f"{record.method}, step {record.step:,}{loss}", fraction, left, record=record)
