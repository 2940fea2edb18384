"""The folder of a run: its results, whether they belong to the same run, and how `--resume` and `--fresh` treat them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from subquad.errors import InputError
from subquad.families.base import Mechanism
from subquad.registry import options_of
from subquad.runs import checkpoints, typed_json
from subquad.runs.files import remove_unfinished
from subquad.runs.machine import describe_machine
from subquad.runs.results_file import ResultsError, command_line, differences
from subquad.runs.typed_json import MisfitError
from subquad.tasks.base import Task
from subquad.training.data import ORDER
from subquad.training.plan import Plan
from subquad.training.results import FILE, SCHEMA, UNFINISHED, Record, Results, TaskFacts, load, save
from subquad.training.trainer import read_state


@dataclass(frozen=True)
class RunFolder:
    """Where a run is kept, and what it is to train.

    Args:
        mechanisms: what to train, by name.
        refused: methods that cannot do the task, with the reason.
        resume: continue what is unfinished.
        fresh: remove what is there, and start over.
    """

    path: Path
    task: Task
    plan: Plan
    mechanisms: dict[str, Mechanism]
    refused: dict[str, str]
    resume: bool
    fresh: bool

    def __post_init__(self) -> None:
        if self.resume and self.fresh:
            raise InputError("a run is resumed or started over; got --resume and --fresh. Pass one of them.")

    def open(self) -> Results:
        """The results in the folder, or new ones, with a record for each method; results of another run are refused."""
        info, file = self.task.info, self.path / FILE
        about = TaskFacts(
            name=info.name, idea=info.idea, kind=info.kind, metric=info.metric, source=info.source,
            higher_is_better=info.higher_is_better,
        )  # fmt: skip
        results = Results(about, self.plan.identity(), describe_machine())
        remove_unfinished(file)
        if file.exists() and self.fresh:
            self._remove()
        elif file.exists() and self._has_begun(saved := load(file)):
            results = saved
            self._require_same_run(results)
        blocked = [path for name in self.mechanisms if (path := self.path / name).exists() and not path.is_dir()]
        if blocked:
            raise ResultsError(
                f"each method needs a folder named after it; {', '.join(map(str, blocked))} is a file. Move it away, or choose "
                "another --out."
            )
        new = {name: mechanism for name, mechanism in self.mechanisms.items() if results.record(name) is None}
        unknown = [name for name in new if checkpoints.has_any(self.path / name)]
        if unknown and not self.fresh:
            raise ResultsError(
                f"cannot resume: {self.path} has models of {', '.join(unknown)}, of which {FILE} has no record. "
                f"Put {FILE} back, choose another --out, or remove them with --fresh."
            )
        for name, mechanism in new.items():
            checkpoints.remove_all(self.path / name)
            results.put(Record(name, options_of(mechanism)))
        for name, why in self.refused.items():
            results.put(Record(name, status="refused", why=why))
        results.command = command_line()
        save(results, file)
        return results

    def _has_begun(self, results: Results) -> bool:
        """Whether there is anything to lose; there is not if the data was missing, for example."""
        ended = ("done", "diverged")
        return any(r.status in ended or r.step or checkpoints.has_any(self.path / r.method) for r in results.records)

    def _require_same_run(self, results: Results) -> None:
        differ = differences(results.settings, self.plan.identity())
        known = [(record, m) for name, m in self.mechanisms.items() if (record := results.record(name)) is not None]
        for record, mechanism in known:
            newest = checkpoints.latest(self.path / record.method) if record.status in UNFINISHED else None
            order = ORDER
            if newest is not None:
                checkpoints.require_intact(newest)
                state = read_state(newest)
                order = state.order
                if state.record.best_step is not None:
                    checkpoints.require_intact(newest.parent / checkpoints.BEST)
            saved = {**record.options, "order of rows": order}
            current = {**options_of(mechanism), "order of rows": ORDER}
            differ += [f"{record.method}, {difference}" for difference in differences(saved, current)]
        if differ:
            raise ResultsError(
                f"the run in {self.path} has other settings ({'; '.join(differ)}). Choose another --out, or start over with "
                "--fresh."
            )
        unfinished = [record.method for record, _ in known if record.status in UNFINISHED]
        if unfinished and not self.resume:
            raise ResultsError(
                f"the run in {self.path} is not finished: {', '.join(unfinished)}. Continue it with --resume, or start over "
                "with --fresh."
            )

    def _remove(self) -> None:
        """Remove what a run has left in the folder, and nothing else."""
        file = self.path / FILE
        if _is_foreign(file):
            raise ResultsError(f"--fresh removes a training run, and {file} is something else. Choose another --out.")
        with contextlib.suppress(ResultsError):  # damaged results do not say which methods there are
            for record in load(file).records:
                checkpoints.remove_all(self.path / record.method)
        os.unlink(file)


def _is_foreign(path: Path) -> bool:
    try:
        saved = typed_json.load(path)
    except (OSError, MisfitError):  # most likely ours, and damaged
        return False
    return not isinstance(saved, dict) or saved.get("schema") != SCHEMA
