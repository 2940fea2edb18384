"""What the conversion of pretrained models loses, and what repairs recover: the tables of docs/converting.md.

    make pretrained && python benchmarks/converting.py --data DIR                      # all of it, a few hours
    python benchmarks/converting.py --data DIR --only stories15m --rows hybrid-32

Each row is a method, with its score after the swap, after attention transfer if it has parameters, after alignment if there is
any, and after low-rank finetuning. None of these stages sees a label or a test text. The errors of heads are those of
`sq.diagnose`, on batches that no repair learns from. Every finished row is written; a second start runs only what is missing,
and resumes a repair from its checkpoint. `benchmarks/studies.py` has the models and rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import subquad as sq
from subquad.conversion import Schedule, StageProgress, align, finetune, mechanisms, transfer
from subquad.models.methods import to_json
from subquad.runs.results_file import read_results

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks.common import command, describe, machine, markdown, write
from benchmarks.pretrained import Batch, Pretrained
from benchmarks.studies import STUDIES, Study

OUT = Path(__file__).with_suffix(".json")
SCHEMA, VERSION = "subquad.converting", 1
JUDGED = 2  # batches to evaluate heads on: a repair holds out the first ones
STAGES = {
    "swapped": "after the swap",
    "transfer": "after transfer",
    "align": "after alignment",
    "finetune": "after finetuning",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SUBQUAD_DATA"), help="folder with real text")
    parser.add_argument("--only", default=",".join(STUDIES), help="models, separated by commas")
    parser.add_argument("--rows", default="", help="rows, separated by commas; all by default")
    parser.add_argument("--checkpoints", type=Path, default=Path("subquad-converting"), help="of unfinished repairs")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    if options.data is None:
        parser.error("real text is needed: pass --data DIR, or set SUBQUAD_DATA")
    for name in options.only.split(","):
        if name not in STUDIES:
            parser.error(f"no model is called {name!r}. Models: {', '.join(STUDIES)}")
        run(STUDIES[name], options)


def run(study: Study, options: argparse.Namespace) -> None:
    """Measure the rows of a model that are missing."""
    console, line = Console(stderr=True), command(__file__, ["--data", "DIR", "--only", study.name])
    wanted = options.rows.split(",") if options.rows else list(study.rows)
    missing = [row for row in wanted if not _is_done(study, row, options.out)]
    if not missing:
        return
    read = study.load(options.data)
    before = study.score(read, options.data)
    batches = cache(lambda text: text.batches(read, options.data, options.checkpoints / study.name))
    for row in missing:
        console.print(f"{study.name}, {row}")
        found = Measured(study, row, read, batches(study.repair_of(row).text), options, console).run()
        models = _models(options.out)
        part = models.setdefault(study.name, {"original": before, "rows": {}})
        part["rows"][row] = {**found, **_settings(study, row), "command": line, "machine": machine()}
        write(options.out, {"schema": SCHEMA, "version": VERSION, "models": models})


class Measured:
    """One row: a converted model, and its figures after each stage."""

    def __init__(
        self, study: Study, row: str, read: Pretrained, batches: list[Batch], options: argparse.Namespace, console: Console
    ) -> None:
        self.study, self.row, self.read, self.batches, self.console = study, row, read, batches, console
        self.data, self.folder = options.data, options.checkpoints / study.name / row
        torch.manual_seed(0)  # some feature maps start at random
        self.converted = sq.convert(read.model, study.rows[row], copy=True, beyond_context=True)
        self.stages: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        self._score_stage("swapped")
        if self.row not in self.study.unrepaired:
            how = self.study.repair_of(self.row)
            if any(next(m.parameters(), None) is not None for m in mechanisms(self.converted).values()):
                self._repair("transfer", transfer, how.transfer)
            if how.align is not None:
                self._repair("align", align, how.align.schedule, **how.align.arguments())
            self._repair("finetune", finetune, how.finetune.schedule, **how.finetune.arguments())
        return {"stages": self.stages}

    def _score_stage(self, stage: str, **more: Any) -> None:
        scores = self.study.score(Pretrained(self.converted, self.read.tokenizer), self.data)
        heads = sq.diagnose(self.read.model, self.converted, self.batches[:JUDGED]).heads
        damage = {"error": _mean(head.error for head in heads), "kl": _mean(head.kl for head in heads)}
        self.stages[stage] = {"scores": scores, **damage, **more}
        self.console.print(stage, scores, damage)

    def _repair(self, stage: str, learn: Callable[..., StageProgress], schedule: Schedule, **more: Any) -> None:
        begun = time.monotonic()
        done = learn(
            self.read.model, self.converted, self.batches, schedule, folder=self.folder, on_progress=self._on_progress, **more
        )
        seconds = max(done.seconds, time.monotonic() - begun)
        self._score_stage(stage, seconds=seconds, step=done.step, ended=done.ended, losses=done.losses)

    def _on_progress(self, done: StageProgress) -> None:
        if done.step % 25 == 0:
            self.console.print(f"{done.stage} {done.step}/{done.steps} {done.loss:.4f} {done.seconds:.0f} s")


def _mean(figures: Iterable[float | None]) -> float | None:
    """The mean of the figures that exist: softmax heads have no error, and not every mechanism has weights to compare."""
    found = [figure for figure in figures if figure is not None]
    return statistics.mean(found) if found else None


def _settings(study: Study, row: str) -> dict[str, Any]:
    settings = {} if row in study.unrepaired else study.repair_of(row).settings()
    return {"method": to_json(study.rows[row], 1), "settings": settings}


def _is_done(study: Study, row: str, out: Path) -> bool:
    if row not in study.rows:
        raise SystemExit(f"{study.name} has no row {row!r}. Rows: {', '.join(study.rows)}")
    found = _models(out).get(study.name, {"rows": {}})["rows"].get(row)
    return found is not None and all(found[name] == value for name, value in _settings(study, row).items())


def _models(out: Path) -> dict[str, Any]:
    """The measurements by model."""
    found: dict[str, Any] = read_results(out, SCHEMA, VERSION)["models"] if out.exists() else {}
    return found


def section(results: dict[str, Any]) -> str:
    """For docs/converting.md: one table per model."""
    found = {name: results["models"][name] for name in STUDIES if name in results["models"]}
    return "\n\n".join(_table(STUDIES[name], part) for name, part in found.items())


def _table(study: Study, part: dict[str, Any]) -> str:
    rows = [part["rows"][name] for name in study.rows if name in part["rows"]]
    stages = {name: when for name, when in STAGES.items() if any(name in row["stages"] for row in rows)}
    headings = [f"{study.metrics[metric]}, {when}" for metric in part["original"] for when in stages.values()]
    before = [word for score in part["original"].values() for word in (f"{score:.4g}", *[""] * (len(stages) - 1))]
    lines = [["original", *before, *[""] * 3]]
    for row in rows:
        scores = [_score(row["stages"].get(stage), metric) for metric in part["original"] for stage in stages]
        seconds = sum(stage.get("seconds", 0) for stage in row["stages"].values())
        steps = " + ".join(f"{stage['step']:,}" for stage in row["stages"].values() if "step" in stage)
        minutes = f"{seconds / 60:.1f}" if seconds else ""
        lines.append([f"`{_method_name(row['method'])}`", *scores, _damage(row["stages"]), steps, minutes])
    table = markdown(["method", *headings, "error of heads", "repair steps", "repair minutes"], lines)
    where = sorted({describe(row["machine"]) for row in rows})
    lines_of_command = sorted({row["command"] for row in rows})
    commands = ", ".join(f"`{line}`" for line in lines_of_command)
    end = ["", *_repairs(rows), "", f"{'; '.join(where)}. Command: {commands}."]
    return "\n".join([f"### {study.title}", "", study.about, "", *table, *end])


def _repairs(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What the repairs learn from and change."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if settings := row["settings"]:
            how = f"{settings['finetune']['targets']} maps at rank {settings['finetune']['rank']}"
            found.setdefault(f"from {settings['text']}; finetuning {how}", []).append(f"`{_method_name(row['method'])}`")
    return [f"- {', '.join(names)}: repaired {words}." for words, names in found.items()]


def _method_name(method: dict[str, Any]) -> str:
    """The method with the options that differ from the defaults."""
    usual = to_json(method["name"], 1)
    options = ", ".join(f"{name}={value}" for name, value in method.items() if value != usual[name])
    return f"{method['name']}({options})" if options else str(method["name"])


def _score(stage: dict[str, Any] | None, metric: str) -> str:
    return "" if stage is None else f"{stage['scores'][metric]:.4g}"


def _damage(stages: dict[str, Any]) -> str:
    """Errors before finetuning, which also changes the inputs of the heads, so that later errors mean little."""
    errors = [stages[name]["error"] for name in ("swapped", "transfer") if name in stages]
    return ", then ".join(f"{error:.2f}" for error in errors if error is not None)


if __name__ == "__main__":
    main()
