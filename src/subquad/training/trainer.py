"""Hugging Face's `Trainer` with what a long run needs: exact resuming, atomic checkpoints, a stop on divergence.

The randomness of a step depends on seed, step and process alone, and its data on seed and step. So a resumed run computes the
same numbers as one that was never stopped.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

from subquad.errors import InputError, SubquadError
from subquad.families.base import Mechanism
from subquad.models import SubquadForCausalLM
from subquad.models.inputs import IGNORED
from subquad.runs import checkpoints, typed_json
from subquad.runs.files import write_atomically
from subquad.runs.memory import PeakMemory
from subquad.runs.precision import mixed_precision
from subquad.runs.typed_json import MisfitError
from subquad.tasks.base import Row, Splits, Task
from subquad.tasks.rows import evenly_spaced, row_count
from subquad.training.data import ORDER, Batches, loader
from subquad.training.plan import Intervals, Plan
from subquad.training.results import Record, require_steps
from subquad.training.steps import StepCallback, StepHistory

STATE = "run.json"  # in a checkpoint, beside what `Trainer` writes
_MAX_NORM = 1.0  # to which gradients are clipped
_DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")


@dataclass(frozen=True)
class CheckpointState:
    """What a checkpoint says about its run: the order of rows in batches (see `data.ORDER`), and how far the run is."""

    order: int
    record: Record
    memory: StepHistory


class DivergedError(SubquadError):
    """A loss that is not finite, or that has risen far above its first value and stayed there."""


@dataclass(frozen=True)
class Job:
    """One method to train; `on_record` is called with its record, and `is_stopping` after each step."""

    plan: Plan
    task: Task
    splits: Splits
    mechanism: Mechanism
    folder: Path
    on_record: Callable[[Record], None]
    is_stopping: Callable[[], bool]


def recompute(model: PreTrainedModel, **options: Any) -> None:
    """Activation checkpointing: keep the inputs of each block only. transformers has renamed this call."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options or None)


def training_arguments(plan: Plan, folder: Path, steps: int, processes: int) -> TrainingArguments:
    """For `Trainer`; the callback below decides when to log, evaluate and save."""
    settings = plan.settings
    return TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=settings.batch // processes,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine",
        warmup_steps=round(settings.warmup * steps),
        weight_decay=settings.weight_decay,
        max_grad_norm=_MAX_NORM,
        bf16=plan.precision == "bf16",
        use_cpu=not torch.accelerator.is_available(),
        ddp_find_unused_parameters=False,  # every parameter is used
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

    def __init__(self, job: Job, model: PreTrainedModel, record: Record, batches: Batches, peak: PeakMemory) -> None:
        self.job, self.record, self.batches, self.peak = job, record, batches, peak
        self.history = StepHistory()
        self.intervals = Intervals(job.plan, batches.steps)
        self.valid = evenly_spaced(job.splits.valid, self.intervals.eval_rows)
        record.eval_rows = row_count(self.valid)
        self.step_loss = self.step_norm = torch.tensor(math.nan)
        self._target = job.folder
        self.begun, self.before = time.monotonic(), record.seconds
        if job.plan.checkpointing:
            recompute(model)
        arguments = training_arguments(job.plan, job.folder, batches.steps, record.processes)
        super().__init__(model, arguments, callbacks=[StepCallback(self)])
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False  # `compute_loss` weights by the number of labels itself
        self.is_causal_lm = isinstance(model, SubquadForCausalLM)

    def restore_record(self, checkpoint: Path) -> None:
        """Set record and history to those of a checkpoint; call it before `train` resumes from there."""
        saved = read_state(checkpoint)
        self.history, before = saved.memory, saved.record
        for name in ("step", "losses", "evals", "best_step", "peak_bytes", "step_seconds"):
            setattr(self.record, name, getattr(before, name))
        self.before = before.seconds

    def require_same_checkpoint(self, checkpoint: Path | None) -> None:
        """Require that all processes see the checkpoint that the first one resumes from."""
        step = 0 if checkpoint is None else checkpoints.step_of(checkpoint)
        first = self.from_first_process({"step": step})["step"]
        if step != first:
            raise InputError(
                f"all processes must resume from the same checkpoint; in {self.job.folder} the first sees that of step "
                f"{first:.0f}, this one that of step {step}. Put --out on a disk that all machines share."
            )

    def get_train_dataloader(self) -> DataLoader[Row]:
        return loader(self.job.splits, self.batches)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the labels of all processes, with label smoothing.

        Gradients are averaged over processes, so the loss of each is weighted by its share of the labels.
        """
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
        """Inputs for which the model computes no loss; labels stay where it makes its decoder inputs from them."""
        is_read = self.model.config.is_encoder_decoder and inputs.keys().isdisjoint(_DECODER_INPUTS)
        return {name: column for name, column in inputs.items() if is_read or name != "labels"}

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Score the model on the validation rows, with the same figures in every process; save it if it is the best so far."""
        with self.peak.paused():
            figures = self.from_first_process(score(self.model, self.job, self.valid))
        if wrong := [name for name, figure in figures.items() if not math.isfinite(figure)]:
            raise self.diverged(f"on validation rows the {wrong[0]} is {figures[wrong[0]]}", self.state.global_step)
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

    def from_first_process(self, figures: dict[str, float]) -> dict[str, float]:
        if self.record.processes == 1:
            return figures
        names = sorted(figures)
        found = torch.tensor([figures[name] for name in names], dtype=torch.float64, device=self.args.device)
        torch.distributed.broadcast(found, 0)
        return dict(zip(names, found.tolist(), strict=True))

    def write(self, target: Path, fill: Callable[[Path], object]) -> None:
        checkpoints.write_folder(target, fill, self.args.should_save, self.accelerator.wait_for_everyone)

    def diverged(self, what: str, step: int) -> DivergedError:
        rate = self.lr_scheduler.get_last_lr()[0]
        newest = checkpoints.latest(self.job.folder)
        kept = "there is no checkpoint yet" if newest is None else f"the last good checkpoint, {newest}, is kept"
        return DivergedError(
            f"{what} at step {step}, with a learning rate of {rate:.3g}; {kept}. "
            f"Start over with a lower --lr than {self.job.plan.settings.lr:g}, or a longer --warmup."
        )

    def report(self) -> None:
        self.record.step = self.state.global_step
        self.record.seconds = self.before + time.monotonic() - self.begun
        self.record.peak_bytes = max(self.record.peak_bytes or 0, self.peak.bytes())
        if self.history.times:
            self.record.step_seconds = statistics.median(self.history.times)
        self.job.on_record(self.record)

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
                state = CheckpointState(ORDER, self.record, self.history)
                write_atomically(folder / STATE, typed_json.dumps(asdict(state)).encode())

        self.write(self.job.folder / name, fill)

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.step_norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)  # sharded under FSDP
        return norm

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._target)  # while a checkpoint is written, the staging folder

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Nothing: the checkpoint is intact, so weights that it lacks are tied to others that it has."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: `StepCallback` seeds every step, so only the first process has anything to write."""


def read_state(checkpoint: Path) -> CheckpointState:
    """What a run wrote beside the checkpoint."""
    try:
        found: CheckpointState = typed_json.parse(CheckpointState, typed_json.load(checkpoint / STATE))
        require_steps(found.record)
    except (OSError, MisfitError) as error:
        raise checkpoints.DamagedError(
            f"{checkpoint / STATE} cannot be read: {error}. Put it back, or remove {checkpoint.parent} to start that method "
            "over."
        ) from error
    return found


def score(model: Any, job: Job, rows: Dataset[Row]) -> dict[str, float]:
    """The task's figures of `model` on these rows; the random state of the training is not touched."""
    was_training, plan = model.training, job.plan
    model.eval()
    with torch.random.fork_rng(), mixed_precision(model.device.type, plan.precision):
        figures = job.task.score(model, rows, job.splits, plan.settings)
    model.train(was_training)
    return figures
