"""What converting pretrained models costs, and what repairs give back: the tables of docs/converting.md.

    make pretrained && python benchmarks/converting.py --data DIR                      # all of it, about two hours
    python benchmarks/converting.py --data DIR --only stories15m --rows hybrid-32

Three models: all-MiniLM-L6-v2 on STS-B (Spearman, more is better), stories15M on TinyStories (nats a token), SmolLM2-135M on
WikiText-2 and War and Peace (perplexity at 2,048 tokens). Each row is a method: the score right after the swap, after attention
transfer where it learns anything, and after low-rank finetuning, neither of which sees a label or a test text. A row is written
when it is done; started again, only what is missing is run, and a repair that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import subquad as sq
from subquad.conversion import Schedule, finetune, mechanisms, transfer
from subquad.mechanisms import Config
from subquad.models.methods import to_json

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks import pretrained
from benchmarks.common import command, machine, write
from benchmarks.pretrained import Batch, Pretrained

OUT = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Study:
    """One model: how it is scored, and what its repairs learn from."""

    name: str
    load: Callable[[Path], Pretrained]
    score: Callable[[Pretrained, Path], dict[str, float]]
    text: Callable[[Pretrained, Path], list[Batch]]
    rows: dict[str, Config]
    transfer: Schedule
    finetune: Schedule
    loss: str
    rank: int = 16
    unrepaired: tuple[str, ...] = field(default_factory=tuple)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SUBQUAD_DATA"), help="folder with real text")
    parser.add_argument("--only", default=",".join(STUDIES), help="models, separated by commas")
    parser.add_argument("--rows", default="", help="rows, separated by commas; all by default")
    parser.add_argument("--checkpoints", type=Path, default=Path("subquad-converting"), help="of repairs that are under way")
    parser.add_argument("--out", type=Path, default=OUT)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if options.data is None:
        parser.error("real text is needed: --data DIR, or SUBQUAD_DATA")
    for name in options.only.split(","):
        if name not in STUDIES:
            parser.error(f"no model is called {name!r}; there are {', '.join(STUDIES)}")
        run(STUDIES[name], options, command(__file__, given))


def run(study: Study, options: argparse.Namespace, line: str) -> None:
    """All rows of a model that are not there yet."""
    console = Console(stderr=True)
    wanted = options.rows.split(",") if options.rows else list(study.rows)
    missing = [row for row in wanted if not _is_done(study, row, options.out)]
    if not missing:
        return
    read = study.load(options.data)
    before = study.score(read, options.data)
    batches = study.text(read, options.data)
    for row in missing:
        console.print(f"{study.name}, {row}")
        found = _measured(study, row, read, batches, options, console)
        saved = _saved(options.out)
        part = saved["models"].setdefault(study.name, {"original": before, "rows": {}})
        part["rows"][row] = {**found, **_settings(study, row), "command": line, "machine": machine()}
        write(options.out, saved)


def _measured(
    study: Study, row: str, read: Pretrained, batches: list[Batch], options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    converted = sq.convert(read.model, study.rows[row], copy=True, beyond_context=True)
    swapped = Pretrained(converted, read.tokenizer)
    folder = options.checkpoints / study.name / row
    found: dict[str, Any] = {"swapped": study.score(swapped, options.data), "seconds": {}, "steps": {}}
    console.print(found["swapped"])

    def repaired(stage: str, learn: Callable[..., Any], schedule: Schedule, **more: Any) -> None:
        begun = time.monotonic()
        progress = learn(read.model, converted, batches, schedule, folder=folder, tell=lambda p: _tell(console, p), **more)
        found[stage] = study.score(swapped, options.data)
        found["seconds"][stage] = max(progress.seconds, time.monotonic() - begun)
        found["steps"][stage] = {"step": progress.step, "ended": progress.ended, "losses": progress.losses}
        console.print(stage, found[stage])

    if row in study.unrepaired:
        return found
    if any(next(m.parameters(), None) is not None for m in mechanisms(converted).values()):
        repaired("transfer", transfer, study.transfer)
    repaired("finetune", finetune, study.finetune, loss=study.loss, rank=study.rank)
    return found


def _tell(console: Console, progress: Any) -> None:
    if progress.step % 25 == 0:
        console.print(f"{progress.stage} {progress.step}/{progress.steps} {progress.loss:.4f} {progress.seconds:.0f} s")


def _settings(study: Study, row: str) -> dict[str, Any]:
    config = study.rows[row]
    stages = {
        "transfer": asdict(study.transfer),
        "finetune": {**asdict(study.finetune), "loss": study.loss, "rank": study.rank},
    }
    return {"method": to_json(config, 1), "settings": {} if row in study.unrepaired else stages}


def _is_done(study: Study, row: str, out: Path) -> bool:
    if row not in study.rows:
        raise SystemExit(f"{study.name} has no row {row!r}; there are {', '.join(study.rows)}")
    found = _saved(out)["models"].get(study.name, {"rows": {}})["rows"].get(row)
    return found is not None and all(found[name] == value for name, value in _settings(study, row).items())


def _saved(out: Path) -> dict[str, Any]:
    from subquad.bench.results import read

    return read(out, "subquad.converting", 1) if out.exists() else {"schema": "subquad.converting", "version": 1, "models": {}}


def _sts(read: Pretrained, data: Path) -> dict[str, float]:
    return {"spearman": pretrained.sts(read, data)}


def _sentences(read: Pretrained, data: Path) -> list[Batch]:
    """Of STS-B's training pairs, without what people said of them."""
    from subquad.tasks.stsb import STSB

    texts = sorted({text for pair in STSB().split("train", data) for text in pair[:2]})
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    batches = []
    for i in range(0, len(texts) - 63, 64):
        some = [texts[j] for j in order[i : i + 64]]
        batches.append(dict(read.tokenizer(some, padding=True, truncation=True, max_length=64, return_tensors="pt")))
    return batches


def _story_nats(read: Pretrained, data: Path) -> dict[str, float]:
    tests = [pretrained.begun(read.tokenizer, text, 256) for text in pretrained.stories(data, "test")[:60]]
    return {"nats": pretrained.nats(read.model, tests)}


def _stories(read: Pretrained, data: Path) -> list[Batch]:
    return pretrained.packed(read.tokenizer, pretrained.stories(data, "val"), 256, 8)


def _perplexities(read: Pretrained, data: Path) -> dict[str, float]:
    texts = {"wikitext2": pretrained.wikitext(data, "test"), "war_and_peace": pretrained.war_and_peace(data)}
    found = {}
    for name, text in texts.items():
        rows = [batch["input_ids"] for batch in pretrained.packed(read.tokenizer, [text[:200_000]], 2048, 1)[:8]]
        found[name] = float(torch.tensor(pretrained.nats(read.model, rows)).exp())
    return found


def _articles(read: Pretrained, data: Path) -> list[Batch]:
    return pretrained.packed(read.tokenizer, [pretrained.wikitext(data, "train")[:2_000_000]], 1024, 1)


STUDIES = {
    study.name: study
    for study in (
        Study(
            name="minilm",
            load=lambda data: pretrained.minilm(),
            score=_sts,
            text=_sentences,
            rows={
                "softmax": sq.Softmax(),
                "hedgehog": sq.Hedgehog(),
                "performer-16": sq.Performer(features=16),
                "performer-64": sq.Performer(features=64),
                "performer-256": sq.Performer(features=256),
                "performer-1024": sq.Performer(features=1024),
                "linear": sq.Linear(),
                "t2r": sq.T2R(),
                "rfa": sq.RFA(),
                "local-4": sq.Local(window=4),
                "hybrid-4": sq.Hybrid(window=4),
                "nystrom-8": sq.Nystrom(landmarks=8),
            },
            transfer=Schedule(steps=150, lr=2e-2, every=50, minutes=4),
            finetune=Schedule(steps=250, lr=2e-3, every=50, minutes=6),
            loss="embedding",
            unrepaired=("softmax",),
        ),
        Study(
            name="stories15m",
            load=pretrained.stories15m,
            score=_story_nats,
            text=_stories,
            rows={
                "softmax": sq.Softmax(),
                "hybrid-32": sq.Hybrid(window=31),  # and the token itself
                "hedgehog": sq.Hedgehog(),
                "local-32": sq.Local(window=31),
                "local-64": sq.Local(window=63),
                "linear": sq.Linear(),
                "performer-256": sq.Performer(features=256),
            },
            transfer=Schedule(steps=400, lr=3e-2, every=100, held_out=0.02),
            finetune=Schedule(steps=400, lr=2e-3, every=100, held_out=0.02),
            loss="distil",
            unrepaired=("softmax",),
        ),
        Study(
            name="smollm2",
            load=lambda data: pretrained.smollm2(),
            score=_perplexities,
            text=_articles,
            rows={
                "softmax": sq.Softmax(),
                "local-256": sq.Local(window=255),
                "hybrid-256": sq.Hybrid(window=255),
                "performer-256": sq.Performer(features=256),
                "linear": sq.Linear(),
            },
            transfer=Schedule(steps=60, lr=2e-2, every=20, minutes=10, held_out=0.02),
            finetune=Schedule(steps=60, lr=1e-3, every=20, minutes=15, held_out=0.02),
            loss="distil",
            unrepaired=("softmax", "linear"),
        ),
    )
}


if __name__ == "__main__":
    main()
