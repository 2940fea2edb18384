"""`subquad compare`: measures every mechanism by length, prints the table and writes the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from subquad.cli.terminal import Bar, folder_named
from subquad.errors import InputError, MissingExtraError
from subquad.report import save_charts, write_page


def compare(
    methods: Annotated[str, typer.Option(help="Names, separated by commas; by default all but softmax and svd.")] = "",
    lengths: Annotated[str, typer.Option(help="First:last, doubling, or a list such as 512,1000,4096.")] = "256:65536",
    heads: Annotated[int, typer.Option(help="Heads.", min=1)] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels a head.", min=1)] = 64,
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    causal: Annotated[bool, typer.Option("--causal", help="Compare the causal forms.")] = False,
    backward: Annotated[bool, typer.Option(help="Also time forward and backward together.")] = True,
    decode: Annotated[bool, typer.Option(help="Also time one token after so many others, where there is a state.")] = True,
    threads: Annotated[int | None, typer.Option(help="Threads; by default as many as PyTorch takes.", min=1)] = None,
    device: Annotated[str, typer.Option(help="Where to run, such as cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(parser=folder_named, help="Folder for results.json and report.html.")] = Path(
        "subquad-compare"
    ),
    budget: Annotated[float, typer.Option(help="Minutes that the measurements may take.")] = 3.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; without it, results in the folder are gone on from.")
    ] = False,
    qkv: Annotated[
        Path | None, typer.Option(help="Tensors query, key and value of a model (.pt, .safetensors), to measure errors on too.")
    ] = None,
    png: Annotated[bool, typer.Option("--png", help="Also write the plots as PNG and SVG files.")] = False,
) -> None:
    """Time, memory and fidelity of each mechanism by length, on this machine, and the length from which it pays."""
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
        Console(stderr=True).print("Stopped. What was measured is kept; the same command goes on from it.")
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
        raise InputError(f"--lengths first:last goes upwards from 1 on; got {text!r}.")
    if not found:
        raise InputError(f"--lengths is first:last, which doubles, or a list such as 512,1000,4096; got {text!r}.")
    return found


def _report(results: Any, out: Path, png: bool) -> None:
    from subquad.bench import analysis
    from subquad.bench.results import PASSES
    from subquad.bench.summary import table

    console = Console(highlight=False)
    console.print(analysis.headline(results), style="bold")
    for kind in PASSES:
        if any(t.rounds for t in results.of(kind)):
            console.print(table(results, kind, console.width))
    for method, why in results.refusals.items():
        console.print(f"{method}: not compared. {escape(why)}", style="dim")
    written = [out / "results.json"]
    try:
        write_page(results, out / "report.html")
        written.append(out / "report.html")
        written += save_charts(results, out) if png else []
    except MissingExtraError as error:
        Console(stderr=True).print(f"[yellow]no page:[/yellow] {escape(str(error))}")
    console.print("Written: " + ", ".join(map(str, written)), soft_wrap=True)
