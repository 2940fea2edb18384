"""`subquad train`: trains methods on a task, prints the table and writes the page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from subquad.cli.terminal import Bar, as_text, folder_named, named_values, print_table, print_whole, with_values
from subquad.errors import InputError, MissingExtraError
from subquad.families.base import Mechanism
from subquad.registry import resolve

_IDEA_WIDTH = 35  # characters, so that the table fits into 80
_BARS = "▁▂▃▄▅▆▇█"


def train(
    task: Annotated[str, typer.Argument(help="A task; without one, all tasks are listed.")] = "",
    method: Annotated[str, typer.Option(help="Names, separated by commas, or all.")] = "",
    length: Annotated[int | None, typer.Option(help="Maximum length of a sequence.")] = None,
    layers: Annotated[int | None, typer.Option(help="Transformer blocks.")] = None,
    dim: Annotated[int | None, typer.Option(help="Width of the model.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step, summed over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate of AdamW.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data, instead of --steps.")] = None,
    warmup: Annotated[
        float | None, typer.Option(help="Fraction of the steps for learning-rate warmup; cosine decay follows.")
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout.")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Label smoothing.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed. The same seed, machine and number of threads give bit-identical results.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the task: tokens=pixels; may be repeated.")] = None,
    method_option: Annotated[
        list[str] | None, typer.Option(help="An option of a method: performer.features=128; may be repeated.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, or bf16 for mixed precision.")] = "fp32",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute blocks in the backward pass to save memory.")
    ] = False,
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations; by default a fifth of all steps.")] = None,
    eval_rows: Annotated[
        int | None,
        typer.Option(help="Validation rows per evaluation; by default so that evaluations take a twentieth of the time."),
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; by default a tenth of all steps.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads; by default PyTorch's number.", min=1)] = None,
    data: Annotated[str | None, typer.Option(help="Folder with local copies of data; by default SUBQUAD_DATA.")] = None,
    out: Annotated[
        Path | None, typer.Option(parser=folder_named, help="Folder of the run; by default subquad-train/TASK.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue what is unfinished in the folder.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove the run in the folder, and start over.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train any number of methods on a task, with the same model and data, and print one table."""
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
                f"Stopped. The run is kept in {as_text(folder)}; the same command with --resume continues it.",
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
    """When its model was built or made its first step; methods that `all` leaves out are refused before."""
    return record.status == "refused" and record.steps is not None


def _methods(text: str, options: Sequence[str]) -> list[str | Mechanism]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not options:
        return list(names)
    if names == ["all"]:
        raise InputError("--method-option needs methods by name; got --method all. Name the methods.")
    found: dict[str, str | Mechanism] = {name: resolve(name).info.name for name in names}
    by_method: dict[str, list[str]] = {}
    for option in options:
        name, dot, rest = option.partition(".")
        if len(names) == 1 and "." not in option.partition("=")[0]:  # the value may have a dot, too
            name, dot, rest = names[0], ".", option
        if not dot or name not in found:
            raise InputError(
                f"--method-option must be method.name=value, for one of the methods ({', '.join(names)}); got {option!r}."
            )
        by_method.setdefault(name, []).append(rest)
    for name, given in by_method.items():
        found[name] = with_values(name, given, f"--method-option {name}.name=value")
    return list(found.values())


def _list_tasks() -> None:
    from subquad.tasks import TASKS

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("task", style="bold", no_wrap=True)
    table.add_column("what", max_width=_IDEA_WIDTH)
    for heading in ("kind", "metric"):
        table.add_column(heading, no_wrap=True)
    for task in TASKS.values():
        info = task.info
        data = f" [dim]({info.source})[/dim]" if info.source else ""
        table.add_row(info.name, as_text(info.idea) + data, info.kind, info.metric)
    print_whole(Console(highlight=False), table)


def _written(results: Any, folder: Path) -> list[Path]:
    """The files of a run, with its page unless the packages for that are not installed."""
    from subquad.report.training import write_training_page

    files = [folder / "results.json"]
    try:
        write_training_page(results, folder / "report.html")
        files.append(folder / "report.html")
    except MissingExtraError as error:
        Console(stderr=True).print(f"[yellow]no report:[/yellow] {as_text(error)}")
    return files


def _print(console: Console, results: Any, places: list[Path]) -> None:
    from subquad.report.training import summary

    print_table(console, summary(results))
    for record in results.records:
        if record.why:
            console.print(f"{record.method}: {record.status}. {as_text(record.why)}", style="dim", soft_wrap=True)
        elif record.losses:
            console.print(f"{record.method:<16}{_sparkline([loss for _, loss in record.losses], 40)}", style="dim")
    console.print(as_text("Written: " + ", ".join(map(str, places))), soft_wrap=True)


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
