"""`subquad generate`: text from a converted or trained model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from subquad.runs.typed_json import printable


def for_terminal(text: str) -> str:
    """A model or its tokenizer could make text that controls a terminal; in a file or a pipe it is left as it is."""
    return printable(text) if sys.stdout.isatty() else text


def generate(
    model: Annotated[str, typer.Argument(help="A folder with any language model, converted or not; or a name on the hub.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of tokens to generate.", min=1)] = 100,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text while it is generated.")] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature; by default the most likely token is taken.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens that together have this probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    beyond_context: Annotated[
        bool, typer.Option("--beyond-context", help="Allow more tokens than the model was trained for.")
    ] = False,
    is_bytes: Annotated[bool, typer.Option("--bytes", help="The tokens of the model are bytes; it has no tokenizer.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="Number of threads; by default PyTorch's.", min=1)] = None,
) -> None:
    """Generate text, in constant memory if the mechanism allows it. Ctrl-C stops generation."""
    import torch

    from subquad.conversion.generation import TextGenerator
    from subquad.report.figures import size
    from subquad.runs.progress import no_transformers_bars
    from subquad.runs.stop import StopRequest

    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if threads is not None:
        torch.set_num_threads(threads)
    with no_transformers_bars():
        generator = TextGenerator.load(model, is_bytes=is_bytes, dtype=dtype)

    def print_piece(piece: str) -> None:
        sys.stdout.write(for_terminal(piece))
        sys.stdout.flush()

    with StopRequest() as stop:
        generated = generator.generate(
            text, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed,
            beyond_context=beyond_context, on_text=print_piece if stream else None, is_stopping=lambda: stop.requested,
        )  # fmt: skip
    typer.echo("" if stream else for_terminal(generated.text))
    cache = "no cache" if generated.state_bytes is None else f"a cache of {size(generated.state_bytes)}"
    count = f"{generated.tokens:,} token{'' if generated.tokens == 1 else 's'}"
    speed = f"{count}, {generated.tokens / generated.seconds:,.1f} per second, {cache}"
    ending = " (the context is full; --beyond-context continues)" if generated.is_cut else ""
    Console(stderr=True, highlight=False).print(f"{speed}{ending}", style="dim", soft_wrap=True)
    if stop.requested:
        raise typer.Exit(130)
