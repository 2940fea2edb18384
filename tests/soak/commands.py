"""The commands that are interrupted: how to run each of them, what it has saved so far, and what the outcome must be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from subquad import bench, training
from subquad.bench import Plan as ComparisonPlan
from subquad.bench import Setting
from subquad.conversion.plan import LoraOptions, LowRankOptions, Repair, Source, StageOptions, Swap, Text
from subquad.conversion.plan import Plan as ConversionPlan
from subquad.conversion.results import load as load_conversion
from subquad.conversion.run import run as run_conversion
from subquad.runs import checkpoints
from subquad.tasks import TASKS

ROUNDS = 2  # of a comparison; an interrupted round is repeated
SAVED = Path(__file__).parents[1] / "saved"  # a small model and a text


class Command(ABC):
    """A run that can be interrupted: how to start it, and what it has done so far."""

    @abstractmethod
    def run(self, out: Path, reached: Callable[[int], None]) -> None:
        """Start or resume it in `out`, and call `reached` with how many pieces of work are saved, at least, by then."""

    @abstractmethod
    def saved(self, out: Path) -> int:
        """How many pieces of work the folder holds, counted as for `reached`."""

    @abstractmethod
    def cells(self, out: Path) -> dict[str, Any]:
        """What is finished, by name. All of it must still be there later; lists may have grown at their end."""

    @abstractmethod
    def result(self, out: Path) -> Any:
        """What must equal the result of an uninterrupted run."""


class Compare(Command):
    """Times vary from run to run, so only the set of complete measurements must be equal."""

    def run(self, out: Path, reached: Callable[[int], None]) -> None:
        rounds = 0
        is_timed = False

        def on_progress(progress: Any) -> None:
            nonlocal rounds, is_timed
            rounds += is_timed  # the next message comes after the measurement has been saved
            is_timed = progress.message.endswith(("forward", "training", "decode"))
            reached(rounds)

        plan = ComparisonPlan(("linear", "local"), (32, 64), rounds=ROUNDS, budget=600.0)
        bench.compare(plan, Setting(heads=2, head_dim=16, threads=1), out, on_progress=on_progress)

    def saved(self, out: Path) -> int:
        return sum(len(t.rounds) for t in self._results(out).timings)

    def cells(self, out: Path) -> dict[str, Any]:
        results = self._results(out)
        facts = {f"{f.method} {f.length}": f.errors for f in results.facts if f.status == "measured" and f.errors}
        return {**{f"{t.method} {t.length} {t.kind}": t.rounds for t in results.timings}, **facts}

    def result(self, out: Path) -> Any:
        results = self._results(out)
        return results.finished, {(t.method, t.length, t.kind, t.status, len(t.rounds) >= ROUNDS) for t in results.timings}

    def _results(self, out: Path) -> Any:
        return bench.load(out / "results.json")


class Train(Command):
    """Two methods trained on digits, one after the other."""

    SAVE_EVERY = 5

    def __init__(self, in_worker: bool) -> None:
        self.in_worker = in_worker

    def run(self, out: Path, reached: Callable[[int], None]) -> None:
        settings = replace(
            TASKS["digits"].info.defaults, layers=1, dim=16, heads=2, batch=16, steps=30, epochs=None, dropout=0.1
        )
        done: dict[str, int] = {}

        def on_progress(progress: Any) -> None:
            done[progress.record.method] = progress.record.step
            reached(sum(max(0, step - self.SAVE_EVERY) for step in done.values()))

        training.train(
            TASKS["digits"](), ["linear", "local"], settings, out, threads=1, eval_every=6, save_every=self.SAVE_EVERY,
            resume=True, in_worker=self.in_worker, on_progress=on_progress,
        )  # fmt: skip

    def saved(self, out: Path) -> int:
        newest = [checkpoints.latest(out / r.method) for r in self._records(out)]
        return sum(checkpoints.step_of(path) for path in newest if path is not None)

    def cells(self, out: Path) -> dict[str, Any]:
        for record in self._records(out):
            for folder in (checkpoints.latest(out / record.method), out / record.method / checkpoints.BEST):
                if folder is not None and folder.exists():
                    checkpoints.require_intact(folder)
        return {r.method: (r.test, r.losses, r.evals) for r in self._records(out) if r.status == "done"}

    def result(self, out: Path) -> Any:
        names = ("method", "status", "losses", "evals", "best_step", "test", "step")
        return {r.method: [getattr(r, name) for name in names] for r in self._records(out)}, _weights(out)

    def _records(self, out: Path) -> Any:
        return training.load(out / "results.json").records


class Convert(Command):
    """A small Llama: a search for a layer to keep, then all stages of repair."""

    def run(self, out: Path, reached: Callable[[int], None]) -> None:
        stages = Repair(
            transfer=StageOptions(steps=40), align=LowRankOptions(steps=30, rank=2), lora=LoraOptions(steps=30, rank=2)
        )
        plan = ConversionPlan(
            source=Source(model=str(SAVED / "llama")),
            swap=Swap(method="hedgehog", keep=1),
            text=Text(files=(SAVED / "counting.txt",), length=24, batch=2, tokens=480),
            repair=stages,
            threads=1,
        )
        run_conversion(plan, out, resume=True)

    def saved(self, out: Path) -> int:
        return len(self.cells(out))

    def cells(self, out: Path) -> dict[str, Any]:
        results = load_conversion(out / "results.json")
        stages = {name: stage.losses for name, stage in results.stages.items() if stage.ended}
        return {**{f"diagnosis {name}": True for name in results.diagnoses}, **stages}

    def result(self, out: Path) -> Any:
        results = load_conversion(out / "results.json")
        scores = {name: [diagnosis.loss_before, diagnosis.loss_after] for name, diagnosis in results.diagnoses.items()}
        return results.is_saved, scores, {name: stage.losses for name, stage in results.stages.items()}, _weights(out)


COMMANDS: dict[str, tuple[Command, int]] = {  # each with its share of the cases, in percent
    "train": (Train(in_worker=False), 58),
    "train in a worker": (Train(in_worker=True), 4),
    "convert": (Convert(), 30),
    "compare": (Compare(), 8),
}


def _weights(out: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(out.rglob("*.safetensors")):
        found |= {f"{path.relative_to(out)} {name}": tensor for name, tensor in load_file(path).items()}
    return found
