"""The files of runs: results and checkpoints."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import subquad as sq
from subquad.bench import Plan as ComparisonPlan
from subquad.bench import Setting, compare
from subquad.bench.results import load as load_comparison
from subquad.bench.results import save as save_comparison
from subquad.cli.compare import _report as report_comparison
from subquad.cli.convert import _print as print_conversion
from subquad.cli.convert import _write_page as write_conversion
from subquad.cli.train import _print as print_training
from subquad.cli.train import _written as write_training
from subquad.conversion.repair.loop import Stage, train
from subquad.conversion.repair.schedule import Schedule
from subquad.conversion.results import load as load_conversion
from subquad.errors import SubquadError
from subquad.runs import checkpoints
from subquad.tasks import TASKS
from subquad.training import train as run_training
from subquad.training.folder import RunFolder
from subquad.training.plan import Plan as TrainingPlan
from subquad.training.plan import class_path
from tests.report.made_up import made_up
from tests.soak import payloads
from tests.soak.damage import Damage
from tests.soak.readers.base import SAVED, Reader, TensorReader, command, convert, converted, kept


class Comparison(Reader):
    """The results of `subquad compare`."""

    share = 8

    def prepare(self, folder: Path, chance: random.Random) -> list[Path]:
        save_comparison(made_up(["linear", "local", "clustered"], [256, 4096, 32768], rounds=2), folder / "results.json")
        return [folder / "results.json"]

    def read(self, folder: Path, chance: random.Random) -> None:
        how = chance.choice(["advise", "advise", "page", "resume"])
        if how == "advise":
            flags = [flag for flag in ("--causal", "--decode", "--training", "--json") if chance.random() < 0.2]
            command("advise", "--length", str(chance.choice([1, 300, 16384, 500_000])), "--results", str(folder), *flags)
        elif how == "page":
            report_comparison(load_comparison(folder / "results.json"), folder, chance.random() < 0.05)
        else:  # they come from another machine, so nothing is measured
            compare(ComparisonPlan(("linear",), (16,)), Setting(threads=2), folder)


class Training(Reader):
    """The results and checkpoints of `subquad train`."""

    share = 8

    def prepare(self, folder: Path, chance: random.Random) -> list[Path]:
        shutil.copytree(SAVED / "training", folder / "run")
        for name in ("best", "checkpoint-3"):
            (folder / "victim" / name).mkdir(parents=True)
        files = sorted(path for path in (folder / "run").rglob("*") if path.is_file())
        return [folder / "run" / "results.json"] * len(files) + files

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> Damage:
        path = chance.choice(files)
        if path.suffix in (".pt", ".bin") and chance.random() < 0.5:
            kind, done = payloads.write_pickle(path, mark, chance)
        elif path.suffix == ".safetensors" and chance.random() < 0.5:
            kind, done = payloads.write_safetensors(path, chance)
        else:
            kind, done = super().spoil([path], mark, chance)
        if path.name not in ("results.json", checkpoints.CHECKSUMS) and chance.random() < 0.5:
            checkpoints.write_checksums(path.parent)
            done += ", with new checksums"
        return kind, done

    def read(self, folder: Path, chance: random.Random) -> None:
        run, settings = folder / "run", tiny_digits()
        if any(path.name == "results.json" for path in changed_since(SAVED / "training", run)) or chance.random() < 0.7:
            task = TASKS["digits"]()
            plan = TrainingPlan(task=class_path(task), settings=settings)
            kind = chance.choice([{"resume": True}, {"resume": True}, {"fresh": True}, {}])
            flags = {"resume": False, "fresh": False, **kind}
            results = RunFolder(run, task, plan, {"linear": sq.Linear()}, {}, **flags).open()
            print_training(Console(highlight=False), results, write_training(results, run))
        else:
            results = run_training(TASKS["digits"](), ["linear"], settings, run, threads=1, resume=True, in_worker=False)
            if results.records[0].status != "done":
                raise SubquadError(results.records[0].why)
        if not all((folder / "victim" / name).exists() for name in ("best", "checkpoint-3")):
            raise AssertionError("a run removed the folders of another run")


class Conversion(Reader):
    """The results of `subquad convert`."""

    share = 6

    def prepare(self, folder: Path, chance: random.Random) -> list[Path]:
        shutil.copytree(converted() / "run", folder / "run")
        if chance.random() < 0.3:
            shutil.copy(SAVED / "conversion" / "results.json", folder / "run")
        return [folder / "run" / "results.json"]

    def read(self, folder: Path, chance: random.Random) -> None:
        if chance.random() < 0.3:
            convert(folder / "run", *chance.choice([["--resume"], ["--fresh"], []]))
        else:
            results = load_conversion(folder / "run" / "results.json")
            print_conversion(results, write_conversion(results, folder / "run", True))


class RepairCheckpoint(TensorReader):
    """The checkpoint of a repair stage."""

    def prepare(self, folder: Path, chance: random.Random) -> list[Path]:
        shutil.copytree(_repaired(), folder / "repair")
        return [folder / "repair" / "small.pt"]

    def read(self, folder: Path, chance: random.Random) -> None:
        repair(folder / "repair")


def changed_since(before: Path, after: Path) -> list[Path]:
    files = (path for path in after.rglob("*") if path.is_file())
    return [path for path in files if path.read_bytes() != (before / path.relative_to(after)).read_bytes()]


def tiny_digits() -> Any:
    return replace(TASKS["digits"].info.defaults, layers=1, dim=8, heads=2, batch=16, steps=12, epochs=None)


class Small(Stage):
    """A repair stage that takes no time."""

    name, lr = "small", 0.1

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(3, 2)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.module(batch["x"]).square().mean()

    def train(self, mode: bool) -> None:
        self.module.train(mode)


def repair(folder: Path, is_stopping: Any = lambda: False) -> None:
    batches = [{"x": torch.ones(2, 3) * i} for i in range(1, 6)]
    train(Small(), batches, Schedule(steps=6, every=2), folder=folder, is_stopping=is_stopping)


@cache
def _repaired() -> Path:
    folder = kept("repair")
    steps = iter([False, False, True])
    repair(folder, lambda: next(steps))
    return folder
