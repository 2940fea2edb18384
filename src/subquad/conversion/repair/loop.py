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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.conversion.activations import Batch
from subquad.conversion.repair.schedule import Schedule, StageProgress
from subquad.errors import InputError, first_line
from subquad.runs import checkpoints
from subquad.runs.files import remove_unfinished
from subquad.runs.precision import mixed_precision
from subquad.runs.tensor_file import read_tensors
from subquad.runs.typed_json import misfit, parse

_WHAT, _ADVICE = "the checkpoint of a repair", "Remove it to start over."
_CLIP = 1.0
_WARMUP = 0.05  # fraction of the steps


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
        checkpoints.write_file(_path(folder, self.stage), content.getvalue())

    @torch.no_grad()
    def load(self, folder: Path | None) -> None:
        if folder is None:
            return
        path = _path(folder, self.stage)
        remove_unfinished(path)
        if not path.exists():
            return
        saved = read_tensors(path, _WHAT, _ADVICE)
        try:
            identity = parse(dict[str, Any], saved["identity"], "identity")
            if identity == self.identity():
                self._restore(saved)
                return
        except Exception as error:  # nothing that a file holds is certain
            raise InputError(f"{path} cannot be read as {_WHAT}: {first_line(error)} {_ADVICE}") from error
        raise InputError(
            f"{path} is the checkpoint of a repair with other settings; got {self.identity()}, and it has "
            f"{identity}. Repeat those settings, choose another folder, or remove it to start over."
        )

    def _restore(self, saved: dict[str, Any]) -> None:
        """Take over what `save` wrote, but for what the stage decides: steps, learning rate, options of the optimizer."""
        shapes = {name: weight.shape for name, weight in self.weights.items()}
        found: StageProgress = parse(StageProgress, saved["progress"], "progress")
        if found.step > self.schedule.steps:
            raise misfit("progress.step", f"must be at most {self.schedule.steps}", found.step)
        self.progress = replace(found, stage=self.stage.name, steps=self.schedule.steps, lr=self.progress.lr)
        _require_shapes(saved["weights"], shapes, "weights")
        _require_shapes(saved["best"], shapes, "best")
        state = saved["optimizer"]["state"]
        for i, entry in state.items():
            shape = list(shapes.values())[i]
            _require_shapes(entry, {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}, f"optimizer.state[{i}]")
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.best = saved["best"]
        for name, weight in self.weights.items():
            weight.copy_(saved["weights"][name])

    def identity(self) -> dict[str, Any]:
        """What must be the same for a stage to be resumed."""
        shapes = {name: list(weight.shape) for name, weight in self.weights.items()}
        settings = {name: value for name, value in asdict(self.schedule).items() if name != "minutes"}
        settings |= {"lr": self.progress.lr, "every": self.schedule.evaluate_every}
        return {"stage": self.stage.name, **settings, "batches": self.count, "weights": shapes}


def _require_shapes(tensors: dict[str, Tensor], shapes: dict[str, torch.Size], place: str) -> None:
    found = {name: tensor.shape for name, tensor in tensors.items() if tensor.is_floating_point()}
    if found != shapes:
        raise misfit(place, f"must be tensors of floating point with the shapes {shapes}", found)


def _split(batches: Sequence[Batch], schedule: Schedule) -> tuple[Sequence[Batch], Sequence[Batch]]:
    """Batches to evaluate on, and batches to train on."""
    held = math.ceil(schedule.held_out * len(batches))
    if len(batches) - held < 1 or not held:
        raise InputError(
            f"a repair holds out some batches and trains on the others, so it needs at least 2; got {len(batches)} with "
            f"held_out={schedule.held_out:g}. Pass more text."
        )
    return batches[:held], batches[held:]


def _order(epoch: int, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    return torch.randperm(count, generator=generator).tolist()


def _lr_factor(step: int, steps: int) -> float:
    """The learning rate relative to its peak: a linear warmup, then a cosine."""
    warm = max(1, round(_WARMUP * steps))
    return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm) / max(1, steps - warm)))


def _path(folder: Path, stage: Stage) -> Path:
    return folder / f"{stage.name}.pt"
