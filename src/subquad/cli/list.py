"""`subquad list`: the mechanisms, what each supports, and which compiled kernels it has on this machine."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from subquad.backend import backend
from subquad.cli.terminal import as_text
from subquad.families.base import Info
from subquad.ops import dispatch, native_library
from subquad.ops.dispatch import Choice
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
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Which operators each has, and whether their compiled kernels run on this machine."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """List the mechanisms, and what each supports; with --kernels, which compiled kernels run here, and if not, why."""
    infos = [info_of(name) for name in methods(is_causal=causal, cross=cross, decode=decode)]
    if kernels:
        _list_kernels(infos, as_json)
        return
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


# Of one call in training, to see its operators; nothing is computed.
_LENGTH, _HEADS, _HEAD_DIM = 2048, 8, 64


def _list_kernels(infos: list[Info], as_json: bool) -> None:
    library, choices = _library(), {info.name: _operators(info.name) for info in infos}
    if as_json:
        records = [
            {"name": name, "operators": [{**asdict(choice), "body": choice.body} for choice in found]}
            for name, found in choices.items()
        ]
        typer.echo(json.dumps({**library, "mechanisms": records}, indent=2))
        return
    console = Console(highlight=False)
    console.print(as_text(f"Processor: {library['machine']}, {library['capability']}"))
    console.print(as_text(f"Kernels: {library['file'] or library['why_missing']}"))
    if library["is_disabled"]:
        console.print("They are turned off by SUBQUAD_NATIVE=0.")
    console.print(_kernel_table(choices))


def _library() -> dict[str, Any]:
    """Which file of kernels is used here, and why not if there is none."""
    why_missing = native_library.why_missing()
    path = None if why_missing else native_library.search().path
    return {
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kinds": native_library.kinds(),
        "file": None if path is None else str(path),
        "why_missing": why_missing or None,
        "is_disabled": not why_missing and not dispatch.has_kernels(),
    }


def _operators(name: str) -> tuple[Choice, ...]:
    """What training runs, in every direction that the mechanism has."""
    mechanism = resolve(name).for_length(_LENGTH)
    module = mechanism.build(heads=_HEADS, head_dim=_HEAD_DIM, dim=_HEADS * _HEAD_DIM)
    query, key, value = (torch.empty(1, _HEADS, _LENGTH, _HEAD_DIM, requires_grad=True) for _ in range(3))
    hidden = torch.empty(1, _LENGTH, _HEADS * _HEAD_DIM) if mechanism.reads_tokens else None
    found: dict[Choice, None] = {}
    for is_causal, need in ((False, "bidirectional"), (True, "is_causal")):
        if not mechanism.reasons([need]):
            options: dict[str, Any] = {"is_causal": is_causal, **({} if hidden is None else {"hidden": hidden})}
            given = (key if mechanism.shares_query_and_key else query, key, value)
            found |= dict.fromkeys(backend(*given, module, **options).operators)
    return tuple(found)


def _kernel_table(choices: dict[str, tuple[Choice, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("operator", no_wrap=True)
    table.add_column("runs", no_wrap=True)
    table.add_column("why not the compiled kernel")
    for name, found in choices.items():
        if not found:
            table.add_row(name, "[dim]-[/dim]", "PyTorch", "it has none")
        for number, choice in enumerate(found):
            operator = as_text(choice.operator.removeprefix("subquad::"))
            body = "[green]native[/green]" if choice.is_native else "PyTorch"
            table.add_row(name if number == 0 else "", operator, body, as_text("; ".join(choice.reasons)))
    return table
