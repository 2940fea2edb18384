"""What a training run is to do, and whether that is possible: the task, the methods, the settings."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from subquad import checks
from subquad.errors import InputError, SubquadError, closest
from subquad.families.base import NEEDS, Mechanism
from subquad.registry import methods as all_methods
from subquad.registry import require, resolve
from subquad.runs.precision import Precision, require_precision
from subquad.tasks.base import Settings, Task

_NEEDS = {
    "bidirectional": ["bidirectional"],
    "causal": ["is_causal", "decode"],
    "encoder-decoder": ["bidirectional", "is_causal", "decode"],
}
_MOST = {"steps": 10**9, "epochs": 10**6, "threads": 1024}  # more is a slip, and ends in errors of libraries
_SHARE, _FORWARD = 0.05, 3  # time of evaluations beside that of steps; rows that are scored while one is learnt from
_LEAST = 256  # rows of an evaluation, if there are so many


class UnknownTaskError(SubquadError, LookupError):
    """A name that no task has."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is the same for all methods of a run.

    Args:
        task: where its class stands, as module:class, so that another process finds it.
        eval_every, save_every: steps between evaluations, and between checkpoints; by default a fifth and a tenth of all.
        eval_rows: validation rows of an evaluation; by default so many that evaluations take about a twentieth of the run.
        data: folder with local copies of the tasks' data.
    """

    task: str
    settings: Settings
    precision: Precision = "fp32"
    checkpointing: bool = False
    eval_every: int | None = None
    save_every: int | None = None
    eval_rows: int | None = None
    threads: int = 1
    data: str | None = None

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on: all that changes the weights or the choice of the best model."""
        settings = {**asdict(self.settings), "options": dict(self.settings.options)}
        return {
            "task": self.task,
            **settings,
            "precision": self.precision,
            "checkpointing": self.checkpointing,
            "eval_every": self.eval_every,
            "eval_rows": self.eval_rows,
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> Plan:
        options = tuple((name, value) for name, value in saved["settings"]["options"])
        return Plan(**{**saved, "settings": Settings(**{**saved["settings"], "options": options})})


class Every:
    """When a run evaluates and writes a checkpoint, in steps, and how many validation rows an evaluation reads."""

    def __init__(self, plan: Plan, steps: int) -> None:
        self.evaluation = plan.eval_every or math.ceil(steps / 5)
        self.checkpoint = plan.save_every or math.ceil(steps / 10)
        evaluations = math.ceil(steps / self.evaluation)
        paid = _SHARE * _FORWARD * steps * plan.settings.batch / evaluations
        self.rows = plan.eval_rows or max(_LEAST, round(paid))


def named(name: str) -> Task:
    """The task of that name."""
    from subquad.tasks import TASKS

    if name not in TASKS:
        raise UnknownTaskError(f"no task is called {name!r}{closest(name, TASKS)} Tasks: {', '.join(TASKS)}.")
    return TASKS[name]()


def place(task: Task) -> str:
    cls = type(task)
    return f"{cls.__module__}:{cls.__qualname__}"


def placed(where: str) -> Task:
    """The task whose class stands there."""
    module, _, name = where.partition(":")
    found: type[Task] = getattr(import_module(module), name)
    return found()


def data_folder(data: str | None) -> Path | None:
    """Where local copies of data are: `data`, or what SUBQUAD_DATA names; None for the public source."""
    base = data or os.environ.get("SUBQUAD_DATA")
    return Path(base) if base else None


def chosen(task: Task, methods: Sequence[str | Mechanism], settings: Settings) -> tuple[dict[str, Mechanism], dict[str, str]]:
    """The mechanisms to train by name, and those that `all` leaves out, with the reason.

    Options that follow from the length are set by it. A method that is named and cannot do the task is refused.
    """
    needs = _NEEDS[task.info.kind]
    if not methods:
        raise InputError("a run needs at least one method; got none. Write --method linear, or --method all.")
    if "all" in methods and len(methods) > 1:
        raise InputError("--method all stands for every method that can do the task; got others beside it. Leave one out.")
    if list(methods) == ["all"]:
        able: dict[str, Mechanism] = {}
        refused = {}
        for name in all_methods():
            config = resolve(name).for_length(settings.length)
            reasons = config.reasons(needs)
            if reasons:
                refused[name] = "; ".join(f"{NEEDS[need]}: {reason}" for need, reason in reasons.items())
            elif config.info.is_oracle:
                refused[name] = "a bound to compare others with, cubic in the length: trained only if named"
            else:
                able[name] = config
        return able, refused
    found: dict[str, Mechanism] = {}
    for method in methods:
        config = method if isinstance(method, Mechanism) else resolve(method).for_length(settings.length)
        if config.info.name in found:
            raise InputError(
                f"each method is trained once in a run; got {config.info.name!r} twice. Name it once, and train it with other "
                "options in another --out."
            )
        require(config, needs)
        found[config.info.name] = config
    return found, {}


def check(plan: Plan, task: Task, processes: int) -> None:
    """Refuse settings that no run can have."""
    settings = plan.settings
    checks.sizes(**{name: getattr(settings, name) for name in ("length", "layers", "dim", "heads", "batch")})
    if (settings.steps is None) == (settings.epochs is None):
        raise InputError(
            f"a run lasts so many steps or so many epochs, one of the two; got steps={settings.steps} and "
            f"epochs={settings.epochs}. Leave one out."
        )
    every = {"steps": settings.steps, "eval_every": plan.eval_every, "save_every": plan.save_every}
    every |= {"eval_rows": plan.eval_rows, "threads": plan.threads}
    checks.sizes(**{name: value for name, value in every.items() if value is not None})
    for name, value in {"steps": settings.steps, "epochs": settings.epochs, "threads": plan.threads}.items():
        if value is not None and value > _MOST[name]:
            raise InputError(f"{name} is at most {_MOST[name]:,}; got {value:,}.")
    above = {"lr": settings.lr, "epochs": settings.epochs}
    for name, value in above.items():
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{name} is a finite number above 0; got {value!r}.")
    shares = {"warmup": settings.warmup, "label_smoothing": settings.label_smoothing, "dropout": settings.dropout}
    for name, value in shares.items():
        if not 0 <= value < 1:
            raise InputError(f"{name} is a share, from 0 up to but not 1; got {value!r}.")
    if not 0 <= settings.weight_decay < math.inf:
        raise InputError(f"weight_decay is a finite number of at least 0; got {settings.weight_decay!r}.")
    if settings.dim % settings.heads:
        raise InputError(f"dim is a multiple of heads; got {settings.dim} and {settings.heads}.")
    if settings.batch % processes:
        raise InputError(
            f"batch is that of all processes together and must be a multiple of their number; got {settings.batch} "
            f"and {processes} processes. Choose --batch {settings.batch + -settings.batch % processes}."
        )
    if plan.data == "":
        raise InputError("--data is a folder; got an empty name. Leave it out, or name the folder.")
    require_precision(plan.precision)
    checks.seed(settings.seed)
    task.options(settings)
    if plan.data is not None and not task.reads_folder(settings):
        raise InputError(f"{task.info.name} brings its data along, and reads no folder; got --data {plan.data}. Leave it out.")


def steps_of(settings: Settings, rows: int) -> int:
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None
    return max(1, math.ceil(settings.epochs * rows / settings.batch))
