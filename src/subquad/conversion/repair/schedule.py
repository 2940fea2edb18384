"""How a stage of repair trains, and how far it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from subquad import checks
from subquad.errors import InputError
from subquad.runs.precision import Precision, require_precision
from subquad.runs.results_file import Count
from subquad.runs.typed_json import Between, Figure

_EVERY = 50  # steps between two evaluations, at most
_EVALUATIONS = 6  # in a stage, at least


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a stage trains.

    Args:
        steps: the largest number of steps.
        lr: the peak learning rate, followed by a cosine down to 0. None for the default of the stage.
        minutes: the stage stops after this time; None for no limit.
        every: steps between two evaluations on the held-out batches, each with a checkpoint; None for 50, or for a sixth of the
            steps if there are fewer than 300.
        patience: the stage ends after this many evaluations without a better loss.
        held_out: fraction of the batches that is not trained on.
        seed: of the order of batches.
        precision: "fp32" to compute in the precision of the weights, or "bf16" for autocast.
    """

    steps: int = 300
    lr: float | None = None
    minutes: float | None = None
    every: int | None = None
    patience: int = 4
    held_out: float = 0.1
    seed: int = 0
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        checks.sizes(steps=self.steps, patience=self.patience)
        checks.sizes(every=self.evaluate_every)
        if self.lr is not None and not (_is_number(self.lr) and 0 < self.lr < math.inf):
            raise InputError(f"lr must be a finite number above 0; got {self.lr!r}.")
        if self.minutes is not None and not (_is_number(self.minutes) and self.minutes > 0):
            raise InputError(f"minutes must be a number above 0; got {self.minutes!r}.")
        if not (_is_number(self.held_out) and 0 <= self.held_out < 1):
            raise InputError(f"held_out must be a fraction from 0 to below 1; got {self.held_out!r}.")
        checks.seed(self.seed)
        require_precision(self.precision)

    @property
    def evaluate_every(self) -> int:
        return max(1, min(_EVERY, self.steps // _EVALUATIONS)) if self.every is None else self.every


@dataclass
class StageProgress:
    """How far a stage of repair is.

    Args:
        lr: the peak learning rate.
        losses: (step, loss on held-out batches) of each evaluation, the first before any step.
        ended: why the stage has ended; empty if it has not.
    """

    stage: str
    steps: Count
    lr: float
    step: Count = 0
    seconds: Annotated[float, Between(0, 1e12)] = 0.0
    loss: Figure = math.nan  # of the last step
    losses: list[tuple[Count, Figure]] = field(default_factory=list)
    ended: str = ""

    @property
    def best(self) -> tuple[int, float]:
        """The step and loss of the best evaluation, whose weights are kept."""
        return min(self.losses, key=lambda entry: entry[1])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
