"""The command line: its commands, and how errors become messages."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from typing import Annotated

import typer
from rich.console import Console

from subquad.cli.advise import advise
from subquad.cli.compare import compare
from subquad.cli.convert import convert
from subquad.cli.generate import generate
from subquad.cli.list import list_methods
from subquad.cli.show import show
from subquad.cli.terminal import as_text
from subquad.cli.train import train
from subquad.errors import SubquadError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Attention whose cost does not grow with the square of the sequence length."""
    if version:
        typer.echo(f"subquad {version_of('subquad')}")
        raise typer.Exit


def _example(command: str) -> str:
    return f"Example: [bold]{command}[/bold]"


app.command("list", epilog=_example("subquad list --causal --decode") + "\n\n" + _example("subquad list --kernels"))(
    list_methods
)
app.command(epilog=_example("subquad show performer --length 64 --out performer.png"))(show)
app.command(epilog=_example("subquad compare --methods linear,local --lengths 256:4096 --budget 1"))(compare)
app.command(epilog=_example("subquad advise --length 4096 --causal --decode"))(advise)
app.command(epilog=_example("subquad train digits --method linear,softmax --epochs 1 --out digits"))(train)
app.command(epilog=_example("subquad convert ./model --method hybrid --text text.txt --repair transfer,lora --out new"))(
    convert
)
app.command(epilog=_example('subquad generate new/model "Once upon a time" --stream'))(generate)


def main() -> None:
    """Run the command line; what subquad refuses becomes a message and exit code 2."""
    try:
        app()
    except SubquadError as error:
        Console(stderr=True).print(f"[red]error:[/red] {as_text(error)}")
        sys.exit(2)
