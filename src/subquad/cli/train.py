"""`subquad train`: reads options, trains, prints the table and writes the page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from subquad.cli.terminal import Bar, configured, folder_named, named_values, print_table, print_whole
from subquad.errors import InputError, MissingExtraError
from subquad.families.base import Mechanism
from subquad.registry import resolve

_WORDS = 35  # columns for what a task is, of the 80 that a window has
_BARS = "▁▂▃▄▅▆▇█"


def train(
    task: Annotated[str, typer.Argument(help="A task; without one, they are listed.")] = "",
    method: Annotated[str, typer.Option(help="Names, separated by commas, or all.")] = "",
    length: Annotated[int | None, typer.Option(help="Tokens of a sequence, at most.")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks.")] = None,
    dim: Annotated[int | None, typer.Option(help="Width of a token.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step, of all processes together.")] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate, of AdamW.")] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="How many passes over the data, instead of --steps.")] = None,
    warmup: Annotated[
        float | None, typer.Option(help="Share of the steps in which the rate rises; then it falls as a cosine.")
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout.")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Label smoothing.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same bits, on the same machine and threads.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the task, as tokens=pixels; may be repeated.")] = None,
    method_option: Annotated[
        list[str] | None, typer.Option(help="An option of a method, as performer.features=128; may be repeated.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, or bf16 for mixed precision.")] = "fp32",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute blocks in the backward pass: less memory.")
    ] = False,
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations; by default a fifth of all.")] = None,
    eval_rows: Annotated[
        int | None, typer.Option(help="Validation rows of an evaluation; by default few enough for a twentieth of the time.")
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; by default a tenth of all.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads; by default as many as PyTorch takes.", min=1)] = None,
    data: Annotated[str | None, typer.Option(help="Folder with local copies of data; by default SUBQUAD_DATA.")] = None,
    out: Annotated[
        Path | None, typer.Option(parser=folder_named, help="Folder of the run; by default subquad-train/TASK.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is unfinished in the folder.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, and remove the run in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train any number of methods on a task: the same model, the same data, one table."""
    from subquad.training import TrainingProgress
    from subquad.training import train as run
    from subquad.training.plan import find_task
    from subquad.training.results import as_json as written

    if not task:
        _list_tasks()
        return
    chosen = find_task(task)
    given = {
        "length": length, "layers": layers, "dim": dim, "heads": heads, "batch": batch, "lr": lr, "warmup": warmup,
        "dropout": dropout, "label_smoothing": label_smoothing, "weight_decay": weight_decay, "seed": seed,
    }  # fmt: skip
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if steps is not None or epochs is not None:
        changes |= {"steps": steps, "epochs": epochs}
    changes["options"] = tuple(named_values(option or [], "--option tokens=pixels").items())
    folder = out or Path("subquad-train") / task
    is_first = os.environ.get("RANK", "0") == "0"
    console = Console(highlight=False, quiet=not is_first)

    def on_progress(progress: TrainingProgress) -> None:
        curve = _sparkline([loss for _, loss in progress.record.losses])
        bar.show(replace(progress, message=f"{progress.message} {curve}"))

    with Bar(is_shown=is_first) as bar:
        try:
            results = run(
                chosen, _methods(method, method_option or []), replace(chosen.info.defaults, **changes), folder,
                precision=precision, checkpointing=checkpointing, eval_every=eval_every, eval_rows=eval_rows,  # type: ignore[arg-type]
                save_every=save_every, threads=threads, data=data, resume=resume, fresh=fresh, on_progress=on_progress,
            )  # fmt: skip
        except KeyboardInterrupt:
            Console(stderr=True, quiet=not is_first).print(
                f"Stopped. The run is kept in {escape(str(folder))}; the same command with --resume goes on from it.",
                soft_wrap=True,
            )
            raise typer.Exit(130) from None
    if not is_first:
        return
    places = _written(results, folder)
    if as_json:
        typer.echo(written(results))
    else:
        _print(console, results, places)
    if any(record.status in ("failed", "diverged") or _is_refused_late(record) for record in results.records):
        raise typer.Exit(1)


def _is_refused_late(record: Any) -> bool:
    """By its own building or first step, rather than as one that `all` leaves out."""
    return record.status == "refused" and record.steps is not None


def _methods(text: str, options: Sequence[str]) -> list[str | Mechanism]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not options:
        return list(names)
    if names == ["all"]:
        raise InputError("options of a method go with methods by name; got --method all and --method-option.")
    found: dict[str, str | Mechanism] = {name: resolve(name).info.name for name in names}
    by_method: dict[str, list[str]] = {}
    for option in options:
        name, dot, rest = option.partition(".")
        if len(names) == 1 and "." not in option.partition("=")[0]:  # a dot in the value is none behind a name
            name, dot, rest = names[0], ".", option
        if not dot or name not in found:
            raise InputError(
                f"an option of a method is method.name=value, of one that is trained ({', '.join(names)}); got {option!r}."
            )
        by_method.setdefault(name, []).append(rest)
    for name, given in by_method.items():
        found[name] = configured(name, given, f"--method-option {name}.name=value")
    return list(found.values())


def _list_tasks() -> None:
    from subquad.tasks import TASKS

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("task", style="bold", no_wrap=True)
    table.add_column("what", max_width=_WORDS)
    for heading in ("kind", "metric"):
        table.add_column(heading, no_wrap=True)
    for task in TASKS.values():
        info = task.info
        data = f" [dim]({info.source})[/dim]" if info.source else ""
        table.add_row(info.name, escape(info.idea) + data, info.kind, info.metric)
    print_whole(Console(highlight=False), table)


def _written(results: Any, folder: Path) -> list[Path]:
    """The files of a run; the page is made now, unless what it needs is not installed."""
    from subquad.report.training import write_training_page

    files = [folder / "results.json"]
    try:
        write_training_page(results, folder / "report.html")
        files.append(folder / "report.html")
    except MissingExtraError as error:
        Console(stderr=True).print(f"[yellow]no page:[/yellow] {escape(str(error))}")
    return files


def _print(console: Console, results: Any, places: list[Path]) -> None:
    from subquad.report.training import summary

    print_table(console, summary(results))
    for record in results.records:
        if record.why:
            console.print(f"{record.method}: {record.status}. {escape(record.why)}", style="dim", soft_wrap=True)
        elif record.losses:
            console.print(f"{record.method:<16}{_sparkline([loss for _, loss in record.losses], 40)}", style="dim")
    console.print("Written: " + ", ".join(map(str, places)), soft_wrap=True)


def _sparkline(values: Sequence[float], width: int = 12) -> str:
    """The curve of `values`, at most `width` characters wide."""
    if not values:
        return ""
    count = min(width, len(values))
    means = []
    for i in range(count):
        part = values[i * len(values) // count : (i + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)
