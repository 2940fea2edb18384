"""`subquad advise`: mechanisms for a workload, from measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from subquad.cli.terminal import as_text
from subquad.errors import SubquadError


def advise(
    length: Annotated[int, typer.Option(help="Tokens.", min=1)],
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention.")] = False,
    cross: Annotated[bool, typer.Option("--cross", help="Cross-attention.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="Decode token by token; rank by the time of one token.")] = False,
    training: Annotated[bool, typer.Option("--training", help="Rank by the time of forward and backward together.")] = False,
    padding: Annotated[bool, typer.Option("--padding", help="Sequences with padding, that is a key_padding_mask.")] = False,
    exact_window: Annotated[
        int | None, typer.Option(help="Pairs of tokens at most this far apart must have softmax weights.", min=1)
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of a comparison; by default subquad-compare, or a quick comparison if that does not fit."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """Recommend mechanisms for a workload, with the measurements behind it."""
    from subquad.bench import advise as ask
    from subquad.bench.advise import load_stored

    usual = Path("subquad-compare")
    needs: dict[str, Any] = {"is_causal": causal or decode, "cross": cross, "decode": decode, "training": training}
    needs |= {"key_padding_mask": padding, "exact_window": exact_window}
    try:
        path = results if results is not None else usual if (usual / "results.json").exists() else None
        given = None if path is None else load_stored(path)
        found = ask(length, results=given, **needs)
    except SubquadError as error:
        if results is not None or path is None:
            raise
        Console(stderr=True).print(f"[dim]{as_text(usual)} does not fit ({as_text(error)}); running a quick comparison.[/dim]")
        found, given = ask(length, **needs), None
    if as_json:
        records = [{**vars(a), "method": a.method.info.name, "options": vars(a.method)} for a in found]
        typer.echo(json.dumps(records, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"Measured {as_text(_where(given, path))}", style="dim")
    for advice in found:
        console.print(advice.method.info.name, style="bold")
        for reason in advice.reasons:
            console.print(f"  {as_text(reason)}")
        console.print(f"  {as_text(advice.code)}", style="cyan")


def _where(results: Any, path: Path | None) -> str:
    """Where the measurements come from."""
    from subquad.runs.machine import describe_machine

    if results is None:
        return "just now, on this machine."
    here = describe_machine()
    place = "this machine" if results.machine.get("processor") == here.get("processor") else "another machine"
    shape = f"{results.setting.heads} heads of {results.setting.head_dim} channels, {results.setting.dtype}"
    return f"in {path}, on {place}: {results.machine.get('processor')}, {results.setting.threads} threads, {shape}."
