"""`Trainer` with what a long run needs: the same weights after any stop, whole checkpoints, a halt on divergence.

Randomness of a step follows from seed, step and process alone, and its data from seed and step. So a run that goes on
from a checkpoint makes the same numbers as one that was never stopped.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from subquad.errors import InputError, SubquadError
from subquad.families.base import Mechanism
from subquad.models import SubquadForCausalLM
from subquad.models.inputs import IGNORED
from subquad.runs import checkpoints, files
from subquad.runs.memory import Peak
from subquad.runs.precision import mixed_precision
from subquad.tasks.base import Row, Splits, Task
from subquad.tasks.rows import length, spread
from subquad.training.data import ORDER, Batches, loader, mixed
from subquad.training.plan import Every, Plan
from subquad.training.results import Record, record_from

STATE = "run.json"  # in a checkpoint, beside what `Trainer` writes
_CLIP = 1.0  # norm of the gradient, at most
_POINTS = 200  # of the loss curve, at most
_KEPT = 1000  # last step times, of which the median is taken
_DECODER_READS = ("decoder_input_ids", "decoder_inputs_embeds")
_LASTING, _TIMES = 20, 3.0  # so many steps above so many times the first loss are a divergence


class DivergedError(SubquadError):
    """A loss that is no number any more, or has left where it began for good."""


@dataclass(frozen=True)
class Job:
    """One method to train: what, where, whom to tell, and whom to ask whether to stop."""

    plan: Plan
    task: Task
    splits: Splits
    config: Mechanism
    folder: Path
    tell: Callable[[Record], None]
    is_stopping: Callable[[], bool]


@dataclass
class Memory:
    """What a run remembers from step to step beside its record."""

    first: float | None = None  # loss of the untrained model
    recent: list[float] = field(default_factory=list)
    since: list[float] = field(default_factory=list)  # losses since the last point of the curve
    times: list[float] = field(default_factory=list)


def recompute(model: PreTrainedModel, **options: Any) -> None:
    """Keep of each block what it read, and compute the rest again for the gradients. transformers has renamed the call."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options or None)


def arguments(plan: Plan, folder: Path, steps: int, processes: int) -> TrainingArguments:
    """What `Trainer` is told; when to log, evaluate and save is not its to decide."""
    settings = plan.settings
    return TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=settings.batch // processes,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine",
        warmup_steps=round(settings.warmup * steps),
        weight_decay=settings.weight_decay,
        max_grad_norm=_CLIP,
        bf16=plan.precision == "bf16",
        use_cpu=not torch.accelerator.is_available(),
        ddp_find_unused_parameters=False,  # there are none
        seed=settings.seed,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


class MethodTrainer(Trainer):
    """One method on one task, in this process or as one of several."""

    control: Any

    def __init__(self, job: Job, model: PreTrainedModel, record: Record, batches: Batches, peak: Peak) -> None:
        self.job, self.record, self.batches, self.peak = job, record, batches, peak
        self.memory = Memory()
        self.every = Every(job.plan, batches.steps)
        self.valid = spread(job.splits.valid, self.every.rows)
        record.eval_rows = length(self.valid)
        self.step_loss = self.step_norm = torch.tensor(math.nan)
        self._target = job.folder
        self.begun, self.before = time.monotonic(), record.seconds
        if job.plan.checkpointing:
            recompute(model)
        super().__init__(model, arguments(job.plan, job.folder, batches.steps, record.processes), callbacks=[_Watch(self)])
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False  # `compute_loss` itself weighs by labels
        self.is_causal_lm = isinstance(model, SubquadForCausalLM)

    def remember(self, checkpoint: Path) -> None:
        """Take up the record where a checkpoint was written; call it before `train` goes on from there."""
        saved = json.loads((checkpoint / STATE).read_text())
        self.memory = Memory(**saved["memory"])
        before = record_from(saved["record"])
        for name in ("step", "losses", "evals", "best_step", "peak_bytes", "step_seconds"):
            setattr(self.record, name, getattr(before, name))
        self.before = before.seconds

    def require_same(self, checkpoint: Path | None) -> None:
        """That all processes see the checkpoint that the first one goes on from."""
        step = 0 if checkpoint is None else checkpoints.step_of(checkpoint)
        first = self.agreed({"step": step})["step"]
        if step != first:
            raise InputError(
                f"all processes go on from one checkpoint; in {self.job.folder} the first sees that of step {first:.0f}, "
                f"this one that of step {step}. Put --out on a disk that all machines share."
            )

    def get_train_dataloader(self) -> DataLoader[Row]:
        return loader(self.job.splits, self.batches)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the labels of all processes, smoothed; gradients are averaged over processes, hence the factor."""
        labels, smoothing = inputs["labels"], self.job.plan.settings.label_smoothing
        wanted = labels[:, 1:] if self.is_causal_lm else labels
        if smoothing:
            outputs = model(**self._without_labels(inputs))
            logits = outputs.logits[:, :-1] if self.is_causal_lm else outputs.logits
            loss = F.cross_entropy(
                logits.flatten(0, -2).float(), wanted.flatten(), label_smoothing=smoothing, ignore_index=IGNORED
            )
        else:
            outputs = model(**inputs)
            loss = outputs.loss
        if self.record.processes > 1:
            count = (wanted != IGNORED).sum().float()
            loss = loss * count / self.accelerator.reduce(count.clone(), "mean").clamp(min=1)
        self.step_loss = loss.detach()
        return (loss, outputs) if return_outputs else loss

    def _without_labels(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """For a model to make no loss of its own; with labels where it makes from them what its decoder reads."""
        is_read = self.model.config.is_encoder_decoder and inputs.keys().isdisjoint(_DECODER_READS)
        return {name: column for name, column in inputs.items() if is_read or name != "labels"}

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The task's figures on the validation rows; every process has those of the first. The best model is saved."""
        with self.peak.paused():
            figures = self.agreed(scored(self.model, self.job, self.valid))
        if wild := [name for name, figure in figures.items() if not math.isfinite(figure)]:
            raise self.diverged(f"on validation rows the {wild[0]} is {figures[wild[0]]}", self.state.global_step)
        best, metric = self.record.best, self.job.task.info.metric
        self.record.evals.append({"step": self.state.global_step, **figures})
        sign = 1 if self.job.task.info.higher_is_better else -1
        if best is None or sign * figures[metric] > sign * best[metric]:
            self.write(self.job.folder / checkpoints.BEST, self.save_best)
            self.record.best_step = self.state.global_step
        self.report()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, figures)
        return figures

    def save_best(self, folder: Path) -> None:
        state = self.accelerator.get_state_dict(self.model_wrapped) if self.is_fsdp_enabled else None
        if self.args.should_save:
            self.accelerator.unwrap_model(self.model).save_pretrained(folder, state_dict=state)
            tokenizer = self.job.task.text_tokenizer()
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)

    def agreed(self, figures: dict[str, float]) -> dict[str, float]:
        if self.record.processes == 1:
            return figures
        names = sorted(figures)
        found = torch.tensor([figures[name] for name in names], dtype=torch.float64, device=self.args.device)
        torch.distributed.broadcast(found, 0)
        return dict(zip(names, found.tolist(), strict=True))

    def write(self, target: Path, fill: Callable[[Path], object]) -> None:
        checkpoints.write(target, fill, self.args.should_save, self.accelerator.wait_for_everyone)

    def diverged(self, what: str, step: int) -> DivergedError:
        rate = self.lr_scheduler.get_last_lr()[0]
        newest = checkpoints.latest(self.job.folder)
        kept = "no checkpoint was written before" if newest is None else f"the last good checkpoint, {newest}, is kept"
        return DivergedError(
            f"{what} at step {step}, with a learning rate of {rate:.3g}; {kept}. "
            f"Start over with a lower --lr than {self.job.plan.settings.lr:g}, or a longer --warmup."
        )

    def report(self) -> None:
        self.record.step = self.state.global_step
        self.record.seconds = self.before + time.monotonic() - self.begun
        self.record.peak_bytes = max(self.record.peak_bytes or 0, self.peak.bytes())
        if self.memory.times:
            self.record.step_seconds = statistics.median(self.memory.times)
        self.job.tell(self.record)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.report()
        name = f"{checkpoints.PREFIX}{self.state.global_step}"

        def fill(folder: Path) -> None:
            self._target = folder.parent
            try:
                super(MethodTrainer, self)._save_checkpoint(model, trial)
            finally:
                self._target = self.job.folder
            if self.args.should_save:
                state = {"order": ORDER, "record": asdict(self.record), "memory": asdict(self.memory)}
                files.write(folder / STATE, json.dumps(state).encode())

        self.write(self.job.folder / name, fill)

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.step_norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)  # FSDP has it in parts
        return norm

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._target)  # while a checkpoint is written, where nobody looks for one

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Nothing: the checkpoint was found whole, so that weights which it lacks are tied to others that it has."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: `_Watch` seeds every step, so only the first process has anything to write."""


class _Watch(TrainerCallback):
    """Looks at every step: seeds it, checks its loss and gradient, times it, and says what is due after it."""

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
        loss, size, asked = seen.tolist()
        self.is_stopped = asked > 0
        self._check(loss, size, state.global_step + 1)

    def _check(self, loss: float, size: float, step: int) -> None:
        memory = self.trainer.memory
        memory.first = loss if memory.first is None else memory.first
        memory.recent = [*memory.recent, loss][-_LASTING:]
        what = ""
        if not math.isfinite(loss):
            what = f"the loss is {loss}"
        elif not math.isfinite(size):
            what = f"the loss is {loss:.4g}, but its gradient is not finite"
        elif len(memory.recent) == _LASTING and min(memory.recent) > _TIMES * abs(memory.first):
            what = f"the loss has been above {_TIMES:g} times its first value, {memory.first:.4g}, for {_LASTING} steps"
        if what:
            raise self.trainer.diverged(what, step)
        memory.since.append(loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        trainer, step, steps = self.trainer, state.global_step, state.max_steps
        trainer.memory.times = [*trainer.memory.times, time.perf_counter() - self.started][-_KEPT:]
        is_last = step >= steps or self.is_stopped
        if step % max(1, steps // _POINTS) == 0 or step >= steps:
            since = trainer.memory.since
            trainer.record.losses.append((step, sum(since) / len(since)))
            trainer.memory.since = []
            trainer.report()
        control.should_evaluate = step % trainer.every.evaluation == 0 or step >= steps
        control.should_save = step % trainer.every.checkpoint == 0 or is_last
        control.should_training_stop = is_last
        return control


def order_of(checkpoint: Path) -> int:
    """In which order the run that wrote it puts rows into batches (see `data.ORDER`)."""
    return int(json.loads((checkpoint / STATE).read_text())["order"])


def has_best(checkpoint: Path) -> bool:
    """Whether the run that wrote it had kept a best model by then."""
    return json.loads((checkpoint / STATE).read_text())["record"]["best_step"] is not None


def scored(model: Any, job: Job, rows: Dataset[Row]) -> dict[str, float]:
    """The task's figures of `model` on these rows; the training's randomness is left alone."""
    was_training, plan = model.training, job.plan
    model.eval()
    with torch.random.fork_rng(), mixed_precision(model.device.type, plan.precision):
        figures = job.task.score(model, rows, job.splits, plan.settings)
    model.train(was_training)
    return figures
