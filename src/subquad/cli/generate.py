"""`subquad generate`: text from a converted or trained model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console


def generate(
    model: Annotated[
        str, typer.Argument(help="A folder with a model, converted, trained or as it came; or a name on the hub.")
    ],
    prompt: Annotated[str, typer.Argument(help="What to go on from; - reads it from the standard input.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write, at most.", min=1)] = 100,
    stream: Annotated[bool, typer.Option("--stream", help="Print words as they come.")] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature; by default the likeliest token is taken.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens with this probability together.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    beyond_context: Annotated[
        bool, typer.Option("--beyond-context", help="Read and write more tokens than the model was made for.")
    ] = False,
    is_bytes: Annotated[bool, typer.Option("--bytes", help="The model's tokens are bytes, and it has no tokenizer.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="Threads; by default as many as PyTorch takes.", min=1)] = None,
) -> None:
    """Text from a model, in constant memory where its mechanism allows; Ctrl-C ends it."""
    import torch

    from subquad.conversion.generation import Writer
    from subquad.report.figures import size
    from subquad.runs.progress import no_transformers_bars
    from subquad.runs.stop import StopRequest

    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if threads is not None:
        torch.set_num_threads(threads)
    with no_transformers_bars():
        writer = Writer.open(model, is_bytes=is_bytes, dtype=dtype)

    def told(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    with StopRequest() as stop:
        written = writer.write(
            text, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed,
            beyond_context=beyond_context, tell=told if stream else None, is_stopping=lambda: stop.requested,
        )  # fmt: skip
    typer.echo("" if stream else written.text)
    state = "no cache" if written.state_bytes is None else f"a state of {size(written.state_bytes)}"
    count = f"{written.tokens:,} token{'' if written.tokens == 1 else 's'}"
    speed = f"{count}, {written.tokens / written.seconds:,.1f} a second, {state}"
    ending = " (the context is full; --beyond-context goes on)" if written.is_cut else ""
    Console(stderr=True, highlight=False).print(f"{speed}{ending}", style="dim", soft_wrap=True)
    if stop.requested:
        raise typer.Exit(130)
