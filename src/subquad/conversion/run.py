"""A whole conversion: load, swap, diagnose, search, repair and save, in a folder that can be stopped at any moment.

OUT/results.json    what was measured: see `results`
OUT/repair          checkpoints of the stages of repair
OUT/model           the converted model and its tokenizer; `from_pretrained` reads it, once subquad is imported
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from subquad.conversion.activations import last_states
from subquad.conversion.diagnosis import diagnose
from subquad.conversion.plan import STAGES, Plan
from subquad.conversion.pretrained import open_config, open_model, open_tokenizer, require_convertible
from subquad.conversion.repair import StageProgress, align, finetune, keep_softmax, transfer
from subquad.conversion.repair.alignment import converted_sites
from subquad.conversion.repair.attention import Transfer
from subquad.conversion.repair.keep import converted_layers, require_count
from subquad.conversion.repair.lora import kind_of
from subquad.conversion.repair.low_rank import changed_maps, need_peft
from subquad.conversion.results import FILE, KEEP, SWAP, Results, load, save
from subquad.conversion.swap import convert
from subquad.conversion.text import Calibration, calibration
from subquad.errors import InputError
from subquad.registry import options_of, resolve
from subquad.runs import checkpoints
from subquad.runs.determinism import deterministic
from subquad.runs.lock import exclusive
from subquad.runs.machine import describe_machine
from subquad.runs.progress import OnProgress, Progress, no_transformers_bars
from subquad.runs.results_file import ResultsError, command_line, differences
from subquad.runs.stop import StopRequest

MODEL, REPAIR, PAGE = "model", "repair", "report.html"


def run(
    plan: Plan, out: Path, *, resume: bool = False, fresh: bool = False, on_progress: OnProgress = lambda progress: None
) -> Results:
    """Do what `plan` says, in the folder `out`, and return what was found.

    Args:
        resume: go on with what is unfinished in `out`.
        fresh: start over, and remove the conversion in `out`.
        on_progress: called with a `Progress` as it advances.

    Raises:
        SubquadError: before anything is written, where it cannot be done.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, when what was learnt is written.
    """
    plan.check()
    with deterministic(plan.threads or torch.get_num_threads()), no_transformers_bars():
        on_progress(Progress(f"loading {plan.model}", 0.0, None))
        job = _prepared(plan, out, on_progress)
        with exclusive(out, "conversion"), StopRequest() as job.stop:
            job.begin(resume, fresh)
            job.do()
    return job.results


def _prepared(plan: Plan, out: Path, on_progress: OnProgress) -> _Job:
    """All that can be refused is refused here, before anything is written."""
    config = open_config(plan.model, plan.gguf)
    require_convertible(plan.model, config)
    original = open_model(plan.model, config, gguf=plan.gguf, dtype=plan.dtype)
    tokenizer = _tokenizer(plan)
    method = resolve(plan.method)
    text = None
    if plan.text:
        text = calibration(
            original, tokenizer, plan.text, **plan.calibration(), is_learnt=bool(plan.repair or plan.keep),
            is_beyond_allowed=plan.beyond_context,
        )  # fmt: skip
        _require_reads(original, text)
    results = Results(
        plan.model, type(original).__name__, method.info.name, options_of(method), plan.identity(text), describe_machine()
    )
    if text is not None:
        judged, learnt = (sum(batch["input_ids"].numel() for batch in part) for part in (text.judged, text.learnt))
        results.calibration = {"files": [str(path) for path in plan.text], "judged_by": judged, "learnt_from": learnt}
    job = _Job(plan, out, on_progress, original, tokenizer, text, results)
    job.swap()
    if plan.keep:
        require_count(plan.keep, len(converted_layers(job.converted)))
    if "transfer" in plan.repair:
        Transfer(original, job.converted)
    if "align" in plan.repair:
        converted_sites(job.converted)
    if {"align", "lora"} & {*plan.repair}:
        need_peft()
        changed_maps(job.converted, **plan.changes())
    if "lora" in plan.repair:
        results.settings["loss"] = kind_of(job.converted, plan.loss)
    return job


def _require_reads(original: PreTrainedModel, text: Calibration) -> None:
    """That the model runs on one sequence of the text."""
    try:
        with torch.no_grad():
            last_states(original, {name: value[:1] for name, value in text.judged[0].items()})
    except Exception as error:  # each model has its own for an input that it misses
        raise InputError(
            f"{type(original).__name__} does not run on calibration text alone: {type(error).__name__}: {error}. Leave --text "
            "out, or convert the part of it that reads text."
        ) from error


def _tokenizer(plan: Plan) -> Any:
    """The model's; None where there is none, and no text to read by it."""
    try:
        return open_tokenizer(plan.model, plan.gguf)
    except InputError:
        if plan.text:
            raise
        return None


class _Job:
    """The parts of a conversion; each leaves what it found in the results, and is not repeated if that is there."""

    stop: StopRequest

    def __init__(
        self, plan: Plan, out: Path, on_progress: OnProgress, original: PreTrainedModel, tokenizer: Any,
        text: Calibration | None, results: Results,
    ) -> None:  # fmt: skip
        self.plan, self.out, self.on_progress, self.results = plan, out, on_progress, results
        self.original, self.tokenizer, self.text = original, tokenizer, text
        self.converted: PreTrainedModel = original

    def begin(self, resume: bool, fresh: bool) -> None:
        """Take the results in the folder, if they are of this conversion; otherwise the folder must have none."""
        path = self.out / FILE
        if path.exists() and not fresh:
            found = load(path)
            if differ := differences(_settings(found), _settings(self.results)):
                raise ResultsError(
                    f"{self.out} has another conversion ({'; '.join(differ)}). Choose another --out, or begin with --fresh."
                )
            if not found.is_saved and not resume:
                raise ResultsError(
                    f"the conversion in {self.out} is not finished. Go on with --resume, or start over with --fresh."
                )
            self.results = replace(found, calibration=self.results.calibration)
        else:
            self._clear(_is_conversion(path))
        self.results.command = command_line()
        self._save()

    def do(self) -> None:
        if self.results.is_saved:
            return
        if self.text is not None:
            self._diagnose(SWAP)
        if self.plan.keep:
            self._keep()
            self._diagnose(KEEP)
        for stage in self.plan.repair:
            self._repair(stage)
            self._diagnose(stage)
        self._write()

    def swap(self, kept: tuple[int, ...] = ()) -> None:
        """Convert the original: a copy, where the original is needed to compare with."""
        torch.manual_seed(self.plan.seed)
        self.converted = convert(
            self.original,
            self.plan.method,
            layers=self.plan.layers,
            keep_softmax=(*self.plan.keep_softmax, *kept),
            self_only=not self.plan.cross,
            copy=self.text is not None,
            beyond_context=self.plan.beyond_context,
        )
        self.results.conversion = self.converted.config.subquad

    def _diagnose(self, part: str) -> None:
        if part in self.results.diagnoses:
            return
        assert self.text is not None
        batches = self.text.judged
        with self._timed(f"diagnosing, {part}") as tell:
            found = diagnose(self.original, self.converted, batches, tell=lambda done: tell(done, len(batches)))
        self.results.diagnoses[part] = found
        self._save()

    def _keep(self) -> None:
        results = self.results
        if results.kept is None:
            assert self.text is not None
            batches = self.text.learnt[: len(self.text.judged)]  # what judges is not to be chosen by

            def told(tried: Any, of: int) -> None:
                if len(tried) > len(results.tried):
                    results.tried = list(tried)
                    self._save()
                tell(len(tried), of)

            with self._timed("keep search") as tell:
                results.kept = keep_softmax(
                    self.original, self.converted, batches, self.plan.keep, known=list(results.tried), tell=told
                )
            results.tried = []
        self.swap(results.kept.layers)
        self._save()

    def _repair(self, stage: str) -> None:
        """A finished stage takes its weights from its checkpoint."""
        assert self.text is not None
        learn: Any = transfer
        if stage == "align":
            learn = partial(align, **self.plan.changes())
        elif stage == "lora":
            learn = partial(finetune, loss=kind_of(self.converted, self.plan.loss), **self.plan.changes())

        def told(progress: StageProgress) -> None:
            known = self.results.stages.get(stage)
            self.results.stages[stage] = replace(progress, losses=list(progress.losses))
            if known is None or len(known.losses) < len(progress.losses):
                self._save()
            left = _left(progress, self.plan.minutes)
            loss = f"loss {progress.loss:.3g}, best {progress.best[1]:.3g}"
            self.on_progress(Progress(f"{stage}, step {progress.step:,}, {loss}", progress.step / progress.steps, left))

        self.on_progress(Progress(stage, 0.0, None))
        torch.manual_seed(self.plan.seed)
        self.results.stages[stage] = learn(
            self.original, self.converted, self.text.learnt, self.plan.schedule(stage),
            folder=self.out / REPAIR, tell=told, is_stopping=lambda: self.stop.requested,
        )  # fmt: skip
        self.results.conversion = self.converted.config.subquad
        self._save()
        if self.stop.requested and not self.results.stages[stage].ended:
            raise KeyboardInterrupt

    def _write(self) -> None:
        self.on_progress(Progress("saving", 0.0, None))
        checkpoints.write_folder(self.out / MODEL, self._fill)
        shutil.rmtree(self.out / checkpoints.STAGING, ignore_errors=True)
        self.results.is_saved = True
        self._save()

    def _fill(self, folder: Path) -> None:
        self.converted.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    @contextmanager
    def _timed(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A way to tell how many of how many are done, which ends the run if that was asked for."""
        begun = time.monotonic()

        def tell(done: int, of: int) -> None:
            if self.stop.requested:
                raise KeyboardInterrupt
            self.on_progress(Progress(f"{what}, {done} of {of}", done / of, (time.monotonic() - begun) * (of - done) / done))

        self.on_progress(Progress(what, 0.0, None))
        yield tell

    def _save(self) -> None:
        save(self.results, self.out / FILE)

    def _clear(self, is_ours: bool) -> None:
        """Make room for a new conversion: the old one goes, checkpoints without results go, all else in the folder stays."""
        if is_ours:
            (self.out / PAGE).unlink(missing_ok=True)
            shutil.rmtree(self.out / MODEL, ignore_errors=True)
        elif (self.out / MODEL).exists():
            raise ResultsError(f"{self.out / MODEL} is there, and of no conversion. Choose another --out.")
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


def _left(progress: StageProgress, minutes: float | None) -> float | None:
    left = progress.seconds / progress.step * (progress.steps - progress.step)
    return left if minutes is None else max(0.0, min(left, 60 * minutes - progress.seconds))
