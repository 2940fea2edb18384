"""The training loop of all stages of repair: resumable at every checkpoint, with early stopping, keeping the best weights.

Step t trains on batch p_e(t mod n), where p_e is a permutation of the n batches, drawn from the seed for each epoch e. So a
stage that was stopped and resumed takes the same steps as one that was not.
"""

from __future__ import annotations

import io
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad import checks
from subquad.conversion.activations import Batch
from subquad.errors import InputError
from subquad.runs.files import write_atomically
from subquad.runs.precision import Precision, mixed_precision, require_precision

_CLIP = 1.0
_WARMUP = 0.05  # fraction of the steps
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
    steps: int
    lr: float
    step: int = 0
    seconds: float = 0.0
    loss: float = math.nan  # of the last step
    losses: list[tuple[int, float]] = field(default_factory=list)
    ended: str = ""

    @property
    def best(self) -> tuple[int, float]:
        """The step and loss of the best evaluation, whose weights are kept."""
        return min(self.losses, key=lambda entry: entry[1])


class Stage(ABC):
    """A stage of repair: what it trains, and its loss."""

    name: str
    lr: float  # the default peak learning rate

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The loss of one batch."""

    @abstractmethod
    def train(self, mode: bool) -> None:
        """Called with True before a training step, and with False before an evaluation."""


OnStageProgress = Callable[[StageProgress], object]


def train(
    stage: Stage,
    batches: Sequence[Batch],
    schedule: Schedule,
    *,
    folder: str | Path | None = None,
    on_progress: OnStageProgress = lambda progress: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> StageProgress:
    """Train, and leave the best weights in place.

    Args:
        folder: for the checkpoint, and to resume from one; None for no checkpoints.
        on_progress: called after each step.
        is_stopping: called after each step; True writes a checkpoint and stops. The stage has then not `ended`.
    """
    folder = None if folder is None else Path(folder)
    held_out, training = _split(batches, schedule)
    weights = stage.parameters()
    lr = stage.lr if schedule.lr is None else schedule.lr
    optimizer = torch.optim.AdamW(weights.values(), lr=lr, weight_decay=0.0)
    run = _Run(stage, schedule, weights, optimizer, StageProgress(stage.name, schedule.steps, lr), {}, len(training))
    run.load(folder)
    progress, started = run.progress, time.monotonic() - run.progress.seconds
    if not progress.losses:
        run.evaluate(held_out)
    while not progress.ended:
        run.step(training)
        progress.seconds = time.monotonic() - started
        is_late = schedule.minutes is not None and progress.seconds > 60 * schedule.minutes
        is_stopped = is_stopping()
        if progress.step % schedule.evaluate_every == 0 or progress.step >= schedule.steps or is_late:
            run.evaluate(held_out)
            progress.ended = run.why_ended(is_late)
        if progress.step % schedule.evaluate_every == 0 or progress.ended or is_stopped:
            run.save(folder)
        on_progress(progress)
        if is_stopped:
            break
    optimizer.zero_grad()
    if progress.ended:
        run.restore_best()
    return progress


@dataclass
class _Run:
    stage: Stage
    schedule: Schedule
    weights: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    progress: StageProgress
    best: dict[str, Tensor]
    count: int  # of batches to train on

    def step(self, batches: Sequence[Batch]) -> None:
        step = self.progress.step
        torch.manual_seed(self.schedule.seed * 1_000_003 + step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.progress.lr * _lr_factor(step, self.schedule.steps)
        self.stage.train(True)
        self.optimizer.zero_grad()
        loss = self._loss(batches[_order(step // self.count, self.count, self.schedule.seed)[step % self.count]])
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights.values(), _CLIP)
        self.progress.loss = float(loss.detach())
        if not math.isfinite(self.progress.loss):
            raise InputError(
                f"{self.stage.name}: the loss is {self.progress.loss} at step {step + 1}, with a learning rate of "
                f"{self.progress.lr:g}. Choose a lower one."
            )
        self.optimizer.step()
        self.progress.step += 1

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> None:
        """Compute the loss of the held-out batches; the best weights are kept."""
        self.stage.train(False)
        loss = sum(float(self._loss(batch)) for batch in batches) / len(batches)
        if not self.progress.losses or loss < self.progress.best[1]:
            self.best = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.progress.losses.append((self.progress.step, loss))

    def _loss(self, batch: Batch) -> Tensor:
        device = next(iter(self.weights.values())).device
        with mixed_precision(device.type, self.schedule.precision):
            return self.stage.loss(batch)

    def why_ended(self, is_late: bool) -> str:
        """The reason to end now; empty if there is none."""
        losses = [loss for _, loss in self.progress.losses]
        since = len(losses) - 1 - losses.index(min(losses))
        if self.progress.step >= self.schedule.steps:
            why = "all steps are done"
        elif is_late:
            why = f"{self.schedule.minutes:g} minutes have passed"
        elif since >= self.schedule.patience:
            why = f"no better loss in {since} evaluations"
        else:
            return ""
        return f"{why}; nothing was gained, so the weights are unchanged" if self.progress.best[0] == 0 else why

    @torch.no_grad()
    def restore_best(self) -> None:
        for name, weight in self.weights.items():
            weight.copy_(self.best[name])
        self.stage.train(False)

    def save(self, folder: Path | None) -> None:
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        torch.save(
            {
                "identity": self.identity(),
                "progress": asdict(self.progress),
                "weights": {name: weight.detach() for name, weight in self.weights.items()},
                "best": self.best,
                "optimizer": self.optimizer.state_dict(),
            },
            content,
        )
        write_atomically(_path(folder, self.stage), content.getvalue())

    @torch.no_grad()
    def load(self, folder: Path | None) -> None:
        if folder is None or not (path := _path(folder, self.stage)).exists():
            return
        try:
            saved: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:
            raise InputError(f"{path} is not a readable checkpoint of a repair: {error}. Remove it to start over.") from error
        if saved["identity"] != self.identity():
            raise InputError(
                f"{path} is the checkpoint of a repair with other settings; got {self.identity()}, and it has "
                f"{saved['identity']}. Repeat those settings, choose another folder, or remove it to start over."
            )
        self.progress = StageProgress(
            **{**saved["progress"], "losses": [tuple(entry) for entry in saved["progress"]["losses"]]}
        )
        self.best = saved["best"]
        for name, weight in self.weights.items():
            weight.copy_(saved["weights"][name])
        self.optimizer.load_state_dict(saved["optimizer"])

    def identity(self) -> dict[str, Any]:
        """What must be the same for a stage to be resumed."""
        shapes = {name: list(weight.shape) for name, weight in self.weights.items()}
        settings = {name: value for name, value in asdict(self.schedule).items() if name != "minutes"}
        settings |= {"lr": self.progress.lr, "every": self.schedule.evaluate_every}
        return {"stage": self.stage.name, **settings, "batches": self.count, "weights": shapes}


def _split(batches: Sequence[Batch], schedule: Schedule) -> tuple[Sequence[Batch], Sequence[Batch]]:
    """Batches to evaluate on, and batches to train on."""
    held = math.ceil(schedule.held_out * len(batches))
    if len(batches) - held < 1 or not held:
        raise InputError(
            f"a repair holds out some batches and trains on the others, so it needs at least 2; got {len(batches)} with "
            f"held_out={schedule.held_out:g}. Pass more text."
        )
    return batches[:held], batches[held:]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _order(epoch: int, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    return torch.randperm(count, generator=generator).tolist()


def _lr_factor(step: int, steps: int) -> float:
    """The learning rate relative to its peak: a linear warmup, then a cosine."""
    warm = max(1, round(_WARMUP * steps))
    return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm) / max(1, steps - warm)))


def _path(folder: Path, stage: Stage) -> Path:
    return folder / f"{stage.name}.pt"
