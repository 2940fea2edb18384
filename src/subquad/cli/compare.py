"""`subquad compare`: measures every mechanism by length, prints tables and writes the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from subquad.cli.terminal import Bar, as_text, folder_named
from subquad.errors import InputError, MissingExtraError
from subquad.report import save_charts, write_page


def compare(
    methods: Annotated[str, typer.Option(help="Names, separated by commas; by default all but softmax and svd.")] = "",
    lengths: Annotated[
        str, typer.Option(help="first:last, doubling each time, or a list such as 512,1000,4096.")
    ] = "256:65536",
    heads: Annotated[int, typer.Option(help="Heads.", min=1)] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels per head.", min=1)] = 64,
    batch: Annotated[int, typer.Option(help="Batch size.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    causal: Annotated[bool, typer.Option("--causal", help="Compare causal attention.")] = False,
    backward: Annotated[bool, typer.Option(help="Also time forward and backward together.")] = True,
    decode: Annotated[bool, typer.Option(help="Also time decoding one token, after a prompt of each length.")] = True,
    threads: Annotated[int | None, typer.Option(help="Threads; by default PyTorch's number.", min=1)] = None,
    device: Annotated[str, typer.Option(help="Device, such as cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(parser=folder_named, help="Folder for results.json and report.html.")] = Path(
        "subquad-compare"
    ),
    budget: Annotated[float, typer.Option(help="Time budget in minutes.")] = 3.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over. Without it, a comparison in the folder is resumed.")
    ] = False,
    qkv: Annotated[
        Path | None,
        typer.Option(help="File with a model's query, key and value (.pt, .safetensors) to measure errors on."),
    ] = None,
    png: Annotated[bool, typer.Option("--png", help="Also write the plots as PNG and SVG files.")] = False,
) -> None:
    """Measure the time, memory and error of each mechanism by length, and from which length on it is faster than SDPA."""
    import torch

    from subquad.bench import Plan, Setting, load
    from subquad.bench import compare as run
    from subquad.bench.compare import FILE
    from subquad.bench.plan import default_methods

    kinds = ["forward", *(["training"] if backward else []), *(["decode"] if decode else [])]
    names = [name.strip() for name in methods.split(",") if name.strip()] or default_methods()
    plan = Plan(tuple(names), tuple(_lengths(lengths)), tuple(kinds), budget=60 * budget, qkv=qkv)  # type: ignore[arg-type]
    setting = Setting(heads, head_dim, batch, dtype, causal, device, threads or torch.get_num_threads())
    stopped = False
    with Bar(precision="at most") as bar:
        try:
            results = run(plan, setting, out, fresh=fresh, on_progress=bar.show)
        except KeyboardInterrupt:
            results, stopped = load(out / FILE), True
    _report(results, out, png)
    if stopped:
        Console(stderr=True).print("Stopped. All measurements are kept; the same command resumes the comparison.")
        raise typer.Exit(130)


def _lengths(text: str) -> list[int]:
    try:
        if ":" in text:
            length, last = (int(part) for part in text.split(":"))
            found = []
            while 0 < length <= last:
                found.append(length)
                length *= 2
        else:
            found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if ":" in text and not found and all(part.strip().isdigit() for part in text.split(":")):
        raise InputError(f"--lengths first:last must have 1 <= first <= last; got {text!r}.")
    if not found:
        raise InputError(f"--lengths must be first:last, doubling each time, or a list such as 512,1000,4096; got {text!r}.")
    return found


def _report(results: Any, out: Path, png: bool) -> None:
    from subquad.bench import analysis
    from subquad.bench.results import PASSES
    from subquad.bench.summary import table

    console = Console(highlight=False)
    console.print(as_text(analysis.headline(results)), style="bold")
    for kind in PASSES:
        if any(t.rounds for t in results.of(kind)):
            console.print(table(results, kind, console.width))
    for method, why in results.refusals.items():
        console.print(f"{method}: not compared. {as_text(why)}", style="dim")
    written = [out / "results.json"]
    try:
        write_page(results, out / "report.html")
        written.append(out / "report.html")
        written += save_charts(results, out) if png else []
    except MissingExtraError as error:
        Console(stderr=True).print(f"[yellow]no report:[/yellow] {as_text(error)}")
    console.print(as_text("Written: " + ", ".join(map(str, written))), soft_wrap=True)
