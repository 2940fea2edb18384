"""The command line. Thin: it reads options, calls the library and prints."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import subquad
from subquad import Info, SubquadError

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
    "decode: a state for token-by-token use; call: works as a plain function, without a module"
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
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", style="bold", no_wrap=True)
    for heading in _CAPABILITIES:
        table.add_column(heading, justify="center")
    for info in infos:
        supported = [need in info.supports for need in _CAPABILITIES.values()]
        table.add_row(info.name, *("[green]yes[/green]" if yes else "[dim]-[/dim]" for yes in supported))
    return table


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


def main() -> None:
    """Run the command line; what subquad refuses becomes a message and exit code 2."""
    try:
        app()
    except SubquadError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}")
        sys.exit(2)
