"""A whole conversion: load, swap, diagnose, search, repair and save. It can be stopped at any moment, and resumed.

OUT/results.json    the measurements, see `results`
OUT/repair          checkpoints of the stages of repair
OUT/model           the converted model and its tokenizer; `subquad.load` loads it
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from subquad.conversion.activations import last_hidden_states
from subquad.conversion.diagnosis import diagnose
from subquad.conversion.plan import STAGES, Plan
from subquad.conversion.pretrained import load_config, load_model, load_tokenizer, require_convertible
from subquad.conversion.repair import StageProgress, align, finetune, keep_softmax, transfer
from subquad.conversion.repair.alignment import converted_sites
from subquad.conversion.repair.attention_transfer import Transfer
from subquad.conversion.repair.keep_search import Trial, converted_layers, require_count
from subquad.conversion.repair.lora import loss_for
from subquad.conversion.repair.low_rank import changed_maps, need_peft
from subquad.conversion.results import FILE, KEEP, SWAP, Results, load, save
from subquad.conversion.swap import convert
from subquad.conversion.text import Calibration, calibration
from subquad.errors import InputError
from subquad.registry import options_of, resolve
from subquad.runs import checkpoints
from subquad.runs.determinism import deterministic
from subquad.runs.files import remove_unfinished
from subquad.runs.lock import exclusive
from subquad.runs.machine import describe_machine
from subquad.runs.progress import OnProgress, Progress, no_transformers_bars
from subquad.runs.results_file import ResultsError, command_line, differences
from subquad.runs.stop import StopRequest

MODEL, REPAIR, PAGE = "model", "repair", "report.html"
_TRAIN: dict[str, Any] = {"transfer": transfer, "align": align, "lora": finetune}


def run(
    plan: Plan, out: Path, *, resume: bool = False, fresh: bool = False, on_progress: OnProgress = lambda progress: None
) -> Results:
    """Convert a model as `plan` says, in the folder `out`, and return the results.

    Args:
        resume: resume the unfinished conversion in `out`.
        fresh: start over, and remove the conversion in `out`.
        on_progress: called with a `Progress` as it advances.

    Raises:
        SubquadError: the plan cannot be carried out. Nothing has been written then.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once everything has been saved.
    """
    plan.check()
    with deterministic(plan.threads or torch.get_num_threads()), no_transformers_bars():
        on_progress(Progress(f"loading {plan.source.model}", 0.0))
        conversion = _prepared(plan, out, on_progress)
        with exclusive(out, "conversion"), StopRequest() as conversion.stop:
            remove_unfinished(out / FILE)
            conversion.open_folder(resume, fresh)
            conversion.run()
    return conversion.results


def _prepared(plan: Plan, out: Path, on_progress: OnProgress) -> _Conversion:
    """Load, check and swap: everything that may be refused is refused here, before anything is written."""
    source = plan.source
    config = load_config(source.model, source.gguf)
    require_convertible(source.model, config)
    original = load_model(source.model, config, gguf=source.gguf, dtype=source.dtype)
    tokenizer = _tokenizer(plan)
    mechanism = resolve(plan.swap.method)
    stages = plan.repair.stages()
    text = None
    if plan.text.files:
        text = calibration(
            original, tokenizer, plan.text.files, **plan.text.sizes(), for_training=bool(stages or plan.swap.keep),
            beyond_context=plan.swap.beyond_context,
        )  # fmt: skip
        _require_runs(original, text)
    results = Results(
        source.model, type(original).__name__, mechanism.info.name, options_of(mechanism), plan.identity(text),
        describe_machine(),
    )  # fmt: skip
    if text is not None:
        measure, train = (sum(batch["input_ids"].numel() for batch in part) for part in (text.evaluation, text.training))
        results.calibration = {"files": [str(path) for path in plan.text.files], "judged_by": measure, "learnt_from": train}
    conversion = _Conversion(plan, out, on_progress, original, tokenizer, text, results)
    conversion.swap()
    if plan.swap.keep:
        require_count(plan.swap.keep, len(converted_layers(conversion.converted)))
    if "transfer" in stages:
        Transfer(original, conversion.converted)
    if "align" in stages:
        converted_sites(conversion.converted)
    for options in (plan.repair.align, plan.repair.lora):
        if options is not None:
            need_peft()
            changed_maps(conversion.converted, **options.arguments())
    if plan.repair.lora is not None:
        results.settings["loss"] = loss_for(conversion.converted, plan.repair.lora.loss)
    return conversion


def _require_runs(original: PreTrainedModel, text: Calibration) -> None:
    """Refuse a model that does not run on one sequence of the text."""
    try:
        with torch.no_grad():
            last_hidden_states(original, {name: value[:1] for name, value in text.evaluation[0].items()})
    except Exception as error:  # models raise all kinds of errors for a missing input
        raise InputError(
            f"{type(original).__name__} does not run on calibration text alone: {type(error).__name__}: {error}. Leave --text "
            "out, or convert only the part of the model that reads text."
        ) from error


def _tokenizer(plan: Plan) -> Any:
    """The tokenizer of the model; None if it has none, and no text needs it."""
    try:
        return load_tokenizer(plan.source.model, plan.source.gguf)
    except InputError:
        if plan.text.files:
            raise
        return None


class _Conversion:
    """The steps of a conversion. Each saves its results, and is skipped when they are there already."""

    stop: StopRequest

    def __init__(
        self, plan: Plan, out: Path, on_progress: OnProgress, original: PreTrainedModel, tokenizer: Any,
        text: Calibration | None, results: Results,
    ) -> None:  # fmt: skip
        self.plan, self.out, self.on_progress, self.results = plan, out, on_progress, results
        self.original, self.tokenizer, self.text = original, tokenizer, text
        self.converted: PreTrainedModel = original

    def open_folder(self, resume: bool, fresh: bool) -> None:
        """Take over the results in the folder, if they belong to this conversion; otherwise the folder must have none."""
        path = self.out / FILE
        if path.exists() and not fresh:
            found = load(path)
            if differ := differences(_settings(found), _settings(self.results)):
                raise ResultsError(
                    f"{self.out} holds another conversion ({'; '.join(differ)}). Choose another --out, or start over with "
                    "--fresh."
                )
            if not found.is_saved and not resume:
                raise ResultsError(
                    f"the conversion in {self.out} is not finished. Resume it with --resume, or start over with --fresh."
                )
            self.results = replace(found, calibration=self.results.calibration)
        else:
            self._clear(_is_conversion(path))
        self.results.command = command_line()
        self._save()

    def run(self) -> None:
        if self.results.is_saved:
            return
        if self.text is not None:
            self._diagnose(SWAP)
        if self.plan.swap.keep:
            self._keep()
            self._diagnose(KEEP)
        for stage in self.plan.repair.stages():
            self._repair(stage)
            self._diagnose(stage)
        self._write()

    def swap(self, kept: tuple[int, ...] = ()) -> None:
        """Convert the original, or a copy of it if the original is needed to compare with."""
        torch.manual_seed(self.plan.seed)
        swap = self.plan.swap
        self.converted = convert(
            self.original,
            swap.method,
            layers=swap.layers,
            keep_softmax=(*swap.keep_softmax, *kept),
            self_only=not swap.cross,
            copy=self.text is not None,
            beyond_context=swap.beyond_context,
        )
        self.results.conversion = self.converted.config.subquad

    def _diagnose(self, step: str) -> None:
        if step in self.results.diagnoses:
            return
        assert self.text is not None
        message = f"diagnosing, {step}"
        self.on_progress(Progress(message, 0.0))

        def advance(progress: Progress) -> None:
            self._advance(replace(progress, message=f"{message}, {progress.message}"))

        self.results.diagnoses[step] = diagnose(self.original, self.converted, self.text.evaluation, on_progress=advance)
        self._save()

    def _keep(self) -> None:
        results = self.results
        if results.kept is None:
            assert self.text is not None
            batches = self.text.training[: len(self.text.evaluation)]  # never select layers on the evaluation text
            message, started = "keep search", time.monotonic()
            self.on_progress(Progress(message, 0.0))

            def advance(tried: Sequence[Trial], total: int) -> None:
                if len(tried) > len(results.tried):
                    results.tried = list(tried)
                    self._save()
                done = len(tried)
                left = (time.monotonic() - started) * (total - done) / done
                self._advance(Progress(f"{message}, {done} of {total}", done / total, left))

            results.kept = keep_softmax(
                self.original, self.converted, batches, self.plan.swap.keep, known=list(results.tried), on_trial=advance
            )
            results.tried = []
        self.swap(results.kept.layers)
        self._save()

    def _repair(self, stage: str) -> None:
        """Run a stage; one that has ended takes its weights from its checkpoint."""
        assert self.text is not None
        options = self.plan.repair.stages()[stage]
        arguments = options.arguments()
        if stage == "lora":
            arguments["loss"] = self.results.settings["loss"]

        def advance(progress: StageProgress) -> None:
            known = self.results.stages.get(stage)
            self.results.stages[stage] = replace(progress, losses=list(progress.losses))
            if known is None or len(known.losses) < len(progress.losses):
                self._save()
            loss = f"loss {progress.loss:.3g}, best {progress.best[1]:.3g}"
            left = _seconds_left(progress, options.minutes)
            self.on_progress(Progress(f"{stage}, step {progress.step:,}, {loss}", progress.step / progress.steps, left))

        self.on_progress(Progress(stage, 0.0))
        torch.manual_seed(self.plan.seed)
        self.results.stages[stage] = _TRAIN[stage](
            self.original, self.converted, self.text.training, options.schedule(self.plan.seed), **arguments,
            folder=self.out / REPAIR, on_progress=advance, is_stopping=lambda: self.stop.requested,
        )  # fmt: skip
        self.results.conversion = self.converted.config.subquad
        self._save()
        if self.stop.requested and not self.results.stages[stage].ended:
            raise KeyboardInterrupt

    def _advance(self, progress: Progress) -> None:
        """Report progress, and stop if that was requested."""
        if self.stop.requested:
            raise KeyboardInterrupt
        self.on_progress(progress)

    def _write(self) -> None:
        self.on_progress(Progress("saving", 0.0))
        checkpoints.write_folder(self.out / MODEL, self._fill)
        self.results.is_saved = True
        self._save()

    def _fill(self, folder: Path) -> None:
        self.converted.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def _save(self) -> None:
        save(self.results, self.out / FILE)

    def _clear(self, has_conversion: bool) -> None:
        """Remove the old conversion and its checkpoints; other files in the folder stay."""
        if has_conversion:
            (self.out / PAGE).unlink(missing_ok=True)
            shutil.rmtree(self.out / MODEL, ignore_errors=True)
        elif (self.out / MODEL).exists():
            raise ResultsError(f"{self.out / MODEL} exists, and does not belong to a conversion. Choose another --out.")
        for stage in STAGES:
            (self.out / REPAIR / f"{stage}.pt").unlink(missing_ok=True)


def _is_conversion(path: Path) -> bool:
    try:
        load(path)
    except ResultsError:
        return False
    return True


def _settings(results: Results) -> dict[str, Any]:
    return {**results.settings, "method": results.method, **results.options}


def _seconds_left(progress: StageProgress, minutes: float | None) -> float:
    left = progress.seconds / progress.step * (progress.steps - progress.step)
    return left if minutes is None else max(0.0, min(left, 60 * minutes - progress.seconds))
