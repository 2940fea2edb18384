"""`subquad list`: the mechanisms, and what each supports."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from subquad.cli.terminal import as_text
from subquad.families.base import Info
from subquad.registry import info as info_of
from subquad.registry import methods, resolve

# Column heading, short enough for a terminal of 80 columns, and the need (see subquad.families.base.NEEDS) that it shows.
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
    "decode: a state to decode token by token; call: works as a plain function, without a module; "
    "opt: only with non-default options, see subquad.why_not"
)


def list_methods(
    causal: Annotated[bool, typer.Option("--causal", help="Only those that can be causal.")] = False,
    cross: Annotated[bool, typer.Option("--cross", help="Only those that support cross-attention.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="Only those with a decode state.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """List the mechanisms, and what each supports."""
    infos = [info_of(name) for name in methods(is_causal=causal, cross=cross, decode=decode)]
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
        facts = f"{info.family} family, {info.engine} engine, {info.time} time{state}. {info.paper}"
        table.add_row(info.name, f"{as_text(info.idea)}\n[dim]{as_text(facts)}[/dim]")
    return table


def _record(info: Info) -> dict[str, Any]:
    return {**vars(info), "refuses": dict(info.refuses), "supports": list(info.supports)}
