"""`train`: all methods of a run, one after the other, and the folder that they are kept in."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from subquad.errors import InputError, SubquadError
from subquad.families.base import Mechanism
from subquad.registry import options_of
from subquad.runs import checkpoints
from subquad.runs.lock import alone
from subquad.runs.machine import describe
from subquad.runs.precision import Precision
from subquad.runs.results_file import ResultsError, differences
from subquad.runs.stop import Stop
from subquad.tasks.base import Settings, Task
from subquad.training.data import ORDER
from subquad.training.plan import Plan, check, chosen, place
from subquad.training.results import FILE, SCHEMA, UNFINISHED, Record, Results, load, save
from subquad.training.run import LostError, process, processes, read_data, run
from subquad.training.trainer import Job, has_best, order_of
from subquad.training.worker import run_apart

Tell = Callable[[Record], None]
Work = Callable[[Mechanism, Path, Tell], Record]
_PATIENCE = timedelta(hours=1)  # of processes that wait while the first one scores
_PAUSE = 1.0  # seconds between two writings of results that only move on


@dataclass(frozen=True)
class Progress:
    """How far a run is: the record of the method at work, the share of all methods that is done, and seconds left for all."""

    record: Record
    share: float
    left: float | None


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
    is_apart: bool = True,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> Results:
    """Train `methods` on `task`, and return their records; `["all"]` are all that can do it.

    Args:
        settings: by default the task's own.
        out: the run's folder. Finished methods in it, of the same settings, are kept and not trained again.
        precision: "fp32", or "bf16" for autocast.
        checkpointing: recompute blocks in the backward pass rather than keep what is inside them.
        eval_every, save_every: steps; by default a fifth and a tenth of all.
        eval_rows: validation rows of an evaluation; by default so many that evaluations take about a twentieth of the run.
        data: folder with local copies of data; by default what SUBQUAD_DATA names, or the public source. Refused by tasks that
            need none.
        resume: go on with what is unfinished in `out`.
        fresh: start over, and remove what `out` holds.
        is_apart: a process for each method. Under `torchrun` or `accelerate launch` it is never so: the processes that those
            start have to do the work themselves.
        watch: told after every so many steps.

    KeyboardInterrupt is raised after Ctrl-C or SIGTERM, when the checkpoint is written.
    """
    _require_arguments(task, methods, is_apart and processes() == 1)
    out = Path(out)
    plan = Plan(
        task=place(task), settings=settings or task.info.defaults, precision=precision, checkpointing=checkpointing,
        eval_every=eval_every, save_every=save_every, eval_rows=eval_rows, threads=threads or torch.get_num_threads(),
        data=data,
    )  # fmt: skip
    if resume and fresh:
        raise InputError("a run goes on, or starts over; got --resume and --fresh. Leave one out.")
    check(plan, task, processes())
    configs, refused = chosen(task, methods, plan.settings)
    if processes() > 1:
        return _shared(plan, task, configs, refused, out, resume, fresh, watch)
    with alone(out, "training") as lock, Stop() as stop:
        results = _begin(plan, task, configs, refused, out, resume, fresh)
        sitting = _Sitting(results, configs, out, watch, is_writer=True)
        work = _apart(plan, stop, lock, results) if is_apart else _here(plan, task, stop, results)
        for config in sitting.due():
            sitting.do(work, config)
            if stop.is_asked:
                raise KeyboardInterrupt
    return results


def _require_arguments(task: Task, methods: Sequence[str | Mechanism], is_apart: bool) -> None:
    if not isinstance(task, Task):
        raise InputError(f"task is a Task, such as subquad.tasks.TASKS['digits'](); got {task!r}.")
    if isinstance(methods, str | Mechanism):
        raise InputError(f"methods is a list of names or config objects; got {methods!r}. Write [{methods!r}].")
    kind = type(task)
    if is_apart and (kind.__module__ == "__main__" or "<locals>" in kind.__qualname__):
        raise InputError(
            f"each method has a process of its own, which imports the task; got {kind.__qualname__}, which stands in a script, "
            "a notebook or a function. Put it into a module, or pass is_apart=False."
        )


def _apart(plan: Plan, stop: Stop, lock: int | None, results: Results) -> Work:
    return lambda config, folder, tell: run_apart(plan, config, folder, tell, stop, lock, results.data)


def _here(plan: Plan, task: Task, stop: Stop, results: Results) -> Work:
    splits = read_data(plan, task, results.data)
    return lambda config, folder, tell: run(Job(plan, task, splits, config, folder, tell, lambda: stop.is_asked))


def _shared(
    plan: Plan, task: Task, configs: dict[str, Mechanism], refused: dict[str, str], out: Path, resume: bool, fresh: bool,
    watch: Callable[[Progress], None],
) -> Results:  # fmt: skip
    """One of several processes that do the same; the first writes, and decides whether there is anything to do."""
    from accelerate import DistributedType, PartialState

    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=_PATIENCE)
    lost = False
    try:
        if state.distributed_type == DistributedType.MULTI_CPU and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
            raise InputError("FSDP needs GPUs: accelerate would quietly copy the model to each CPU process. Leave it out.")
        with contextlib.ExitStack() as held, Stop() as stop:

            def begin() -> Results:
                held.enter_context(alone(out, "training"))
                return _begin(plan, task, configs, refused, out, resume, fresh)

            results = _agreed(begin)
            sitting = _Sitting(results, configs, out, watch, is_writer=process() == 0)
            work = _here(plan, task, stop, results)
            for config in sitting.due():
                try:
                    sitting.do(work, config)
                except LostError:
                    lost = True
                    stop.stay()
                    raise
                if sitting.is_stopped:
                    raise KeyboardInterrupt
            return results
    finally:
        if not lost:  # those who are gone cannot be said goodbye to
            state.destroy_process_group()


def _agreed(decide: Callable[[], Results]) -> Results:
    """What the first process decides, in all of them; or its refusal."""
    said: list[Any] = [None]
    if process() == 0:
        try:
            said = [decide()]
        except SubquadError as error:
            said = [error]
    torch.distributed.broadcast_object_list(said, 0)
    if isinstance(said[0], SubquadError):
        raise said[0]
    results: Results = said[0]
    return results


def _begin(
    plan: Plan, task: Task, configs: dict[str, Mechanism], refused: dict[str, str], out: Path, resume: bool, fresh: bool
) -> Results:
    """The results in `out` with a record for each method, or new ones; what does not fit is refused."""
    info, path = task.info, out / FILE
    about = {"name": info.name, "idea": info.idea, "kind": info.kind, "metric": info.metric, "source": info.source}
    results = Results({**about, "higher_is_better": info.higher_is_better}, plan.identity(), describe())
    if path.exists() and fresh:
        _remove(out)
    elif path.exists() and _has_begun(before := load(path), out):
        results = before
        _compare(results, plan, configs, out, resume)
    if blocked := [str(out / name) for name in configs if (out / name).exists() and not (out / name).is_dir()]:
        raise ResultsError(
            f"each method has a folder of its name; {', '.join(blocked)} is none. Move it away, or choose another --out."
        )
    new = {name: config for name, config in configs.items() if results.record(name) is None}
    untold = [name for name in new if checkpoints.is_used(out / name)]
    if untold and not fresh:
        raise ResultsError(
            f"what {FILE} does not tell of is not gone on from, and {out} holds models of {', '.join(untold)} that it does not "
            f"tell of. Put {FILE} back, choose another --out, or remove them with --fresh."
        )
    for name, config in new.items():
        checkpoints.clear(out / name)
        results.put(Record(name, options_of(config)))
    for name, why in refused.items():
        results.put(Record(name, status="refused", why=why))
    results.command = shlex.join(["subquad", *sys.argv[1:]])
    save(results, path)
    return results


def _has_begun(results: Results, out: Path) -> bool:
    """Whether there is anything to lose: not after a start that has found no data, say."""
    ended = ("done", "diverged")
    return any(r.status in ended or r.step or checkpoints.is_used(out / r.method) for r in results.records)


def _compare(results: Results, plan: Plan, configs: dict[str, Mechanism], out: Path, resume: bool) -> None:
    differ = differences(results.settings, plan.identity())
    known = [(results.record(name), config) for name, config in configs.items()]
    for record, config in known:
        if record is not None:
            newest = checkpoints.latest(out / record.method) if record.status in UNFINISHED else None
            if newest is not None:
                checkpoints.require_whole(newest)
                if has_best(newest):
                    checkpoints.require_whole(newest.parent / checkpoints.BEST)
            order = ORDER if newest is None else order_of(newest)
            before, now = ({**record.options, "order of rows": order}, {**options_of(config), "order of rows": ORDER})
            differ += [f"{record.method}, {d}" for d in differences(before, now)]
    if differ:
        raise ResultsError(
            f"the run in {out} has other settings ({'; '.join(differ)}). Choose another --out, or start over with --fresh."
        )
    unfinished = [record.method for record, _ in known if record is not None and record.status in UNFINISHED]
    if unfinished and not resume:
        raise ResultsError(
            f"the run in {out} is not finished: {', '.join(unfinished)}. Go on with --resume, or start over with --fresh."
        )


def _remove(out: Path) -> None:
    """What a run of ours has left in `out`, and nothing else."""
    path = out / FILE
    if _is_foreign(path):
        raise ResultsError(f"--fresh removes a training, and {path} is of something else. Choose another --out.")
    with contextlib.suppress(ResultsError):  # of results that cannot be read the methods are not known
        for record in load(path).records:
            checkpoints.clear(out / record.method)
    os.unlink(path)


def _is_foreign(path: Path) -> bool:
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError):  # most likely ours, and damaged
        return False
    return not isinstance(saved, dict) or saved.get("schema") != SCHEMA


class _Sitting:
    """Passes on what methods tell: to the file, and to who watches."""

    def __init__(
        self, results: Results, configs: dict[str, Mechanism], out: Path, watch: Callable[[Progress], None], is_writer: bool
    ) -> None:
        self.results, self.configs, self.path, self.watch, self.is_writer = results, configs, out / FILE, watch, is_writer
        self.is_stopped = False
        self._told, self._written = ("", "", 0), 0.0
        self._begun: tuple[float, float] | None = None  # when the first steps were made, and the share done by then

    def due(self) -> list[Mechanism]:
        waiting = (*UNFINISHED, "waiting")
        records = [self.results.record(name) for name in self.configs]
        return [self.configs[r.method] for r in records if r is not None and r.status in waiting]

    def do(self, work: Work, config: Mechanism) -> None:
        record = work(config, self.path.parent / config.info.name, self._tell)
        self.is_stopped = record.status == "stopped"

    def _tell(self, record: Record) -> None:
        self.results.put(record)
        told = (record.method, record.status, len(record.evals))
        if self.is_writer and (told != self._told or time.monotonic() > self._written + _PAUSE):
            save(self.results, self.path)
            self._told, self._written = told, time.monotonic()
        self.watch(self._progress(record))

    def _progress(self, record: Record) -> Progress:
        open_ones = (*UNFINISHED, "waiting")
        records = [r for r in map(self.results.record, self.configs) if r is not None]
        parts = [r.step / (r.steps or 1) if r.status in open_ones else 1.0 for r in records]
        share = sum(parts) / len(parts)
        if self._begun is None and record.step:
            self._begun = time.monotonic(), share
        since, before = self._begun or (0.0, share)
        left = (time.monotonic() - since) * (1 - share) / (share - before) if share > before else None
        return Progress(record, share, left)
