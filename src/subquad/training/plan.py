"""The plan of a training run: task, methods and settings, and whether they go together."""

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
_MAXIMUM = {"steps": 10**9, "epochs": 10**6, "threads": 1024}  # more is a typo, and libraries fail on it
_EVAL_SHARE = 0.05  # time of evaluations, as a fraction of that of training steps
_EVAL_SPEED = 3  # rows that are scored in the time that one takes in training
_MIN_EVAL_ROWS = 256


class UnknownTaskError(SubquadError, LookupError):
    """A name that no task has."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all methods of a run have in common.

    Args:
        task: its class as module:class, from which a worker process makes it again.
        eval_every, save_every: steps between evaluations and between checkpoints; by default a fifth and a tenth of all steps.
        eval_rows: validation rows of an evaluation; by default chosen so that evaluations take about a twentieth of the run.
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
        """What must be equal for a run to be resumed: all that affects the weights or the choice of the best model."""
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


class Intervals:
    """Steps between evaluations and between checkpoints, and how many validation rows an evaluation reads."""

    def __init__(self, plan: Plan, steps: int) -> None:
        self.evaluation = plan.eval_every or math.ceil(steps / 5)
        self.checkpoint = plan.save_every or math.ceil(steps / 10)
        evaluations = math.ceil(steps / self.evaluation)
        affordable = _EVAL_SHARE * _EVAL_SPEED * steps * plan.settings.batch / evaluations
        self.eval_rows = plan.eval_rows or max(_MIN_EVAL_ROWS, round(affordable))


def find_task(name: str) -> Task:
    """The task of that name."""
    from subquad.tasks import TASKS

    if name not in TASKS:
        raise UnknownTaskError(f"no task is called {name!r}{closest(name, TASKS)} Tasks: {', '.join(TASKS)}.")
    return TASKS[name]()


def class_path(task: Task) -> str:
    """The task's class, as module:class."""
    cls = type(task)
    return f"{cls.__module__}:{cls.__qualname__}"


def load_task(path: str) -> Task:
    """The task whose class is at `path`, see `class_path`."""
    module, _, name = path.partition(":")
    found: type[Task] = getattr(import_module(module), name)
    return found()


def data_folder(data: str | None) -> Path | None:
    """The folder with local copies of data: `data`, or SUBQUAD_DATA; None for the public source."""
    base = data or os.environ.get("SUBQUAD_DATA")
    return Path(base) if base else None


def choose_methods(
    task: Task, methods: Sequence[str | Mechanism], settings: Settings
) -> tuple[dict[str, Mechanism], dict[str, str]]:
    """The mechanisms to train, by name, and those that `all` leaves out, with the reason.

    Methods given by name get their options for the length. A method that is named but cannot do the task raises an error.
    """
    needs = _NEEDS[task.info.kind]
    if not methods:
        raise InputError("a run needs at least one method; got none. Pass --method linear, or --method all.")
    if "all" in methods and len(methods) > 1:
        raise InputError("--method all means every method that can do the task; got other methods as well. Leave them out.")
    if list(methods) == ["all"]:
        able: dict[str, Mechanism] = {}
        refused = {}
        for name in all_methods():
            mechanism = resolve(name).for_length(settings.length)
            reasons = mechanism.reasons(needs)
            if reasons:
                refused[name] = "; ".join(f"{NEEDS[need]}: {reason}" for need, reason in reasons.items())
            elif mechanism.info.is_oracle:
                refused[name] = "a bound to compare others with, not a practical method: trained only if named"
            else:
                able[name] = mechanism
        return able, refused
    found: dict[str, Mechanism] = {}
    for method in methods:
        mechanism = method if isinstance(method, Mechanism) else resolve(method).for_length(settings.length)
        if mechanism.info.name in found:
            raise InputError(
                f"a run trains each method once; got {mechanism.info.name!r} twice. Name it once, and use another --out for "
                "other options."
            )
        require(mechanism, needs)
        found[mechanism.info.name] = mechanism
    return found, {}


def check_plan(plan: Plan, task: Task, processes: int) -> None:
    """Refuse settings that no run can have."""
    settings = plan.settings
    checks.sizes(**{name: getattr(settings, name) for name in ("length", "layers", "dim", "heads", "batch")})
    if (settings.steps is None) == (settings.epochs is None):
        raise InputError(
            f"pass either steps or epochs, which both set the length of a run; got steps={settings.steps} and "
            f"epochs={settings.epochs}."
        )
    counts = {"steps": settings.steps, "eval_every": plan.eval_every, "save_every": plan.save_every}
    counts |= {"eval_rows": plan.eval_rows, "threads": plan.threads}
    checks.sizes(**{name: value for name, value in counts.items() if value is not None})
    for name, value in {"steps": settings.steps, "epochs": settings.epochs, "threads": plan.threads}.items():
        if value is not None and value > _MAXIMUM[name]:
            raise InputError(f"{name} must be at most {_MAXIMUM[name]:,}; got {value:,}.")
    positive = {"lr": settings.lr, "epochs": settings.epochs}
    for name, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{name} must be a finite number above 0; got {value!r}.")
    fractions = {"warmup": settings.warmup, "label_smoothing": settings.label_smoothing, "dropout": settings.dropout}
    for name, value in fractions.items():
        if not 0 <= value < 1:
            raise InputError(f"{name} must be a fraction, at least 0 and below 1; got {value!r}.")
    if not 0 <= settings.weight_decay < math.inf:
        raise InputError(f"weight_decay must be a finite number of at least 0; got {settings.weight_decay!r}.")
    if settings.dim % settings.heads:
        raise InputError(f"dim must be a multiple of heads; got dim={settings.dim} and heads={settings.heads}.")
    if settings.batch % processes:
        raise InputError(
            f"batch is the total over all processes and must be a multiple of their number; got {settings.batch} "
            f"and {processes} processes. Pass --batch {settings.batch + -settings.batch % processes}."
        )
    if plan.data == "":
        raise InputError("--data must be a folder; got an empty name. Leave it out, or name the folder.")
    require_precision(plan.precision)
    checks.seed(settings.seed)
    task.options(settings)
    if plan.data is not None and not task.reads_folder(settings):
        raise InputError(f"{task.info.name} needs no data folder; got --data {plan.data}. Leave it out.")


def count_steps(settings: Settings, rows: int) -> int:
    """The number of steps of a run on `rows` training rows."""
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None
    return max(1, math.ceil(settings.epochs * rows / settings.batch))
