"""What happens around each training step: seeding, the check for divergence, timing, and what follows it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from subquad.training.data import mixed

if TYPE_CHECKING:
    from subquad.training.trainer import MethodTrainer

_MAX_POINTS = 200  # of the loss curve
_TIMED_STEPS = 1000  # the last ones, of which the median is taken
_DIVERGED_STEPS, _DIVERGED_RATIO = 20, 3.0  # a run has diverged if its loss was above 3 times the first one for 20 steps


@dataclass
class StepHistory:
    """Losses and times of past steps; checkpoints hold it beside the record."""

    first: float | None = None  # loss of the untrained model
    recent: list[float] = field(default_factory=list)
    since: list[float] = field(default_factory=list)  # losses since the last point of the curve
    times: list[float] = field(default_factory=list)  # seconds


class StepCallback(TrainerCallback):
    """Seeds each step, checks its loss and gradient, times it, and decides what follows it."""

    def __init__(self, trainer: MethodTrainer) -> None:
        self.trainer = trainer
        self.started = 0.0
        self.is_stopped = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(mixed(args.seed, state.global_step, args.process_index))
        self.started = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        stopping = torch.tensor(float(trainer.job.is_stopping()))
        seen = torch.stack([x.detach().float().to(args.device) for x in (trainer.step_loss, trainer.step_norm, stopping)])
        if trainer.record.processes > 1:
            seen = trainer.accelerator.reduce(seen, "mean")
        loss, norm, stopping_mean = seen.tolist()
        self.is_stopped = stopping_mean > 0
        self._check(loss, norm, state.global_step + 1)

    def _check(self, loss: float, norm: float, step: int) -> None:
        history = self.trainer.history
        history.first = loss if history.first is None else history.first
        history.recent = [*history.recent, loss][-_DIVERGED_STEPS:]
        what = ""
        if not math.isfinite(loss):
            what = f"the loss is {loss}"
        elif not math.isfinite(norm):
            what = f"the loss is {loss:.4g}, but its gradient is not finite"
        elif len(history.recent) == _DIVERGED_STEPS and min(history.recent) > _DIVERGED_RATIO * abs(history.first):
            what = (
                f"the loss has been above {_DIVERGED_RATIO:g} times its first value, {history.first:.4g}, for "
                f"{_DIVERGED_STEPS} steps"
            )
        if what:
            raise self.trainer.diverged(what, step)
        history.since.append(loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        trainer, step, steps = self.trainer, state.global_step, state.max_steps
        trainer.history.times = [*trainer.history.times, time.perf_counter() - self.started][-_TIMED_STEPS:]
        is_last = step >= steps or self.is_stopped
        if step % max(1, steps // _MAX_POINTS) == 0 or step >= steps:
            since = trainer.history.since
            trainer.record.losses.append((step, sum(since) / len(since)))
            trainer.history.since = []
            trainer.report()
        control.should_evaluate = step % trainer.intervals.evaluation == 0 or step >= steps
        control.should_save = step % trainer.intervals.checkpoint == 0 or is_last
        control.should_training_stop = is_last
        return control
