"""`subquad show`: a picture of which tokens attend to which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from subquad.cli.terminal import as_text, with_values
from subquad.report import attention_map, render, save


def show(
    method: Annotated[str, typer.Argument(help="A name from 'subquad list'.")],
    length: Annotated[int | None, typer.Option(help="Tokens, at most 4096; by default 64 to 1024.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the method: features=128; may be repeated.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention.")] = False,
    heads: Annotated[int, typer.Option(help="Heads; those with equal attention are drawn once.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Channels per head.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the random input.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the picture to this file, .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of the picture.")] = False,
) -> None:
    """Show which tokens attend to which: the pairs that a mechanism selects, or its weights beside those of exact softmax."""
    mechanism = with_values(method, option or [])
    shown = attention_map(
        mechanism, length=length, heads=heads, head_dim=head_dim, is_causal=True if causal else None, seed=seed
    )
    if out is not None:
        save(shown, out)
    if as_json:
        typer.echo(json.dumps({**shown.facts(), "out": None if out is None else str(out)}, indent=2))
        return
    console = Console(highlight=False)
    console.print(render(shown, console))
    if out is not None:
        console.print(f"Written to {as_text(out)}.", soft_wrap=True)
