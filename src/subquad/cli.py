"""The command line. Thin: it reads options, calls the library and prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import subquad
from subquad import Info, InputError, MissingExtraError, SubquadError
from subquad.cli_convert import convert
from subquad.cli_generate import generate
from subquad.cli_parts import Bar, configured, folder_named
from subquad.cli_train import train
from subquad.registry import resolve
from subquad.report import attention_map, render, save, save_charts, write_page

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

# Column heading, short enough for 80 columns, and the need (see subquad.mechanisms.NEEDS) that it shows.
_CAPABILITIES = {
    "causal": "is_causal",
    "bidir": "bidirectional",
    "cross": "cross",
    "pads": "key_padding_mask",
    "mask": "attn_mask",
    "scale": "scale",
    "drop": "dropout_p",
    "gqa": "enable_gqa",
    "decode": "decode",
    "call": "functional",
}
_LEGEND = (
    "bidir: bidirectional; pads: key_padding_mask; mask: attn_mask; drop: dropout_p; gqa: fewer key-value heads; "
    "decode: a state for token-by-token use; call: works as a plain function, without a module; "
    "opt: with other options than the defaults, subquad.why_not says which"
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Attention that does not grow with the square of the sequence."""
    if version:
        typer.echo(f"subquad {subquad.__version__}")
        raise typer.Exit


@app.command("list", epilog="Example: [bold]subquad list --causal --decode[/bold]")
def list_methods(
    causal: Annotated[bool, typer.Option("--causal", help="Only those with a causal form.")] = False,
    cross: Annotated[bool, typer.Option("--cross", help="Only those that attend to another sequence.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="Only those with a decode state.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """What mechanisms there are, and what each can do."""
    infos = [subquad.info(name) for name in subquad.methods(is_causal=causal, cross=cross, decode=decode)]
    if as_json:
        typer.echo(json.dumps([_record(info) for info in infos], indent=2))
        return
    console = Console(highlight=False)
    console.print(_capabilities(infos))
    console.print(_LEGEND, style="dim")
    console.print()
    console.print(_descriptions(infos))


def _capabilities(infos: list[Info]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("method", style="bold", no_wrap=True)
    for heading in _CAPABILITIES:
        table.add_column(heading, justify="center")
    for info in infos:
        table.add_row(info.name, *(_mark(info, need) for need in _CAPABILITIES.values()))
    return table


def _mark(info: Info, need: str) -> str:
    if not resolve(info.name).reasons([need]):
        return "[green]yes[/green]"
    return "opt" if need in info.supports else "[dim]-[/dim]"


def _descriptions(infos: list[Info]) -> Table:
    table = Table(box=None, padding=(0, 1, 1, 0), show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for info in infos:
        state = f", state {info.state}" if info.state else ""
        facts = f"{info.engine} engine, {info.time} time{state}. {info.paper}"
        table.add_row(info.name, f"{escape(info.idea)}\n[dim]{escape(facts)}[/dim]")
    return table


def _record(info: Info) -> dict[str, Any]:
    plain = {
        **vars(info),
        "refuses": dict(info.refuses),
        "small": dict(info.small),
        "variants": [dict(options) for options in info.variants],
    }
    return {**plain, "supports": list(info.supports)}


@app.command(epilog="Example: [bold]subquad show performer --length 64 --out performer.png[/bold]")
def show(
    method: Annotated[str, typer.Argument(help="A name from 'subquad list'.")],
    length: Annotated[int | None, typer.Option(help="Tokens, at most 4096; by default 64 to 1024, by the method.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the method, as features=128; may be repeated.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="The causal form.")] = False,
    heads: Annotated[int, typer.Option(help="Heads; those that attend alike are drawn once.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Channels a head.")] = 64,
    seed: Annotated[int, typer.Option(help="What the input is drawn from.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write a picture: a file that ends in .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and no picture.")] = False,
) -> None:
    """Who attends to whom: the pairs a mechanism chooses, or its effective weights beside exact softmax's."""
    config = configured(method, option or [])
    shown = attention_map(config, length=length, heads=heads, head_dim=head_dim, is_causal=True if causal else None, seed=seed)
    if out is not None:
        save(shown, out)
    if as_json:
        typer.echo(json.dumps({**shown.facts(), "out": None if out is None else str(out)}, indent=2))
        return
    console = Console(highlight=False)
    console.print(render(shown, console))
    if out is not None:
        console.print(f"Written to {escape(str(out))}.", soft_wrap=True)


@app.command(epilog="Example: [bold]subquad compare --methods linear,local --lengths 256:4096 --budget 1[/bold]")
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
    with Bar() as bar:
        try:
            results = run(
                plan, setting, out, fresh=fresh, watch=lambda p: bar.show(p.doing, p.share, f"{p.left:.0f} s left at most")
            )
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


@app.command(epilog="Example: [bold]subquad advise --length 4096 --causal --decode[/bold]")
def advise(
    length: Annotated[int, typer.Option(help="Tokens.", min=1)],
    causal: Annotated[bool, typer.Option("--causal", help="It must be causal.")] = False,
    cross: Annotated[bool, typer.Option("--cross", help="It must attend to another sequence.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="It must decode token by token; ranked by the time of one.")] = False,
    training: Annotated[bool, typer.Option("--training", help="Rank by forward and backward together.")] = False,
    padding: Annotated[bool, typer.Option("--padding", help="It must take a key_padding_mask.")] = False,
    exact_window: Annotated[
        int | None, typer.Option(help="Pairs at most so far apart must be weighed as softmax weighs them.", min=1)
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of a comparison; by default subquad-compare, or a quick one now if that does not fit."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """What to use for a workload, with the measured reasons."""
    from subquad.bench import advise as ask
    from subquad.bench.advise import stored

    usual = Path("subquad-compare")
    needs: dict[str, Any] = {"is_causal": causal or decode, "cross": cross, "decode": decode, "training": training}
    needs |= {"key_padding_mask": padding, "exact_window": exact_window}
    try:
        path = results if results is not None else usual if (usual / "results.json").exists() else None
        given = None if path is None else stored(path)
        found = ask(length, results=given, **needs)
    except SubquadError as error:
        if results is not None or path is None:
            raise
        Console(stderr=True).print(f"[dim]{escape(str(usual))} does not fit ({escape(str(error))}); a quick one is run.[/dim]")
        found, given = ask(length, **needs), None
    if as_json:
        records = [{**vars(a), "method": a.method.info.name, "options": vars(a.method)} for a in found]
        typer.echo(json.dumps(records, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"Measured {_where(given, path)}", style="dim")
    for advice in found:
        console.print(advice.method.info.name, style="bold")
        for reason in advice.reasons:
            console.print(f"  {reason}")
        console.print(f"  {escape(advice.code)}", style="cyan")


app.command(epilog="Example: [bold]subquad train digits --method linear,softmax --epochs 1 --out digits[/bold]")(train)
app.command(
    epilog="Example: [bold]subquad convert ./model --method hybrid --text text.txt --repair transfer,lora --out new[/bold]"
)(convert)
app.command(epilog='Example: [bold]subquad generate new/model "Once upon a time" --stream[/bold]')(generate)


def _where(results: Any, path: Path | None) -> str:
    """What an advice rests on."""
    from subquad.bench.machine import describe

    if results is None:
        return "just now, on this machine."
    here = describe(results.setting)
    place = "this machine" if results.machine.get("processor") == here.get("processor") else "another machine than this"
    shape = f"{results.setting.heads} heads of {results.setting.head_dim} channels, {results.setting.dtype}"
    return f"in {path}, on {place}: {results.machine.get('processor')}, {results.setting.threads} threads, {shape}."


def main() -> None:
    """Run the command line; what subquad refuses becomes a message and exit code 2."""
    try:
        app()
    except SubquadError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}")
        sys.exit(2)


if __name__ == "__main__":
    main()
