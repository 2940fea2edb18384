"""`subquad convert`: reads options, converts, prints what was lost and what came back, and writes the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from subquad import InputError, OptionError
from subquad.cli.terminal import Bar, folder_named, print_table, with_values
from subquad.errors import load_extra

_WORST = 10  # heads that are printed


def convert(
    model: Annotated[str, typer.Argument(help="A folder with a Hugging Face model, or its name on the hub.")],
    method: Annotated[str, typer.Option(help="A name from 'subquad list'.")],
    option: Annotated[list[str] | None, typer.Option(help="An option of the method, as window=64; may be repeated.")] = None,
    gguf: Annotated[str | None, typer.Option(help="The name of a GGUF file inside MODEL.")] = None,
    layers: Annotated[str, typer.Option(help="all, numbers such as 0,3,5, or every k, as in 'every 2'.")] = "all",
    keep_softmax: Annotated[str, typer.Option(help="Numbers of layers that stay as they are.")] = "",
    cross: Annotated[bool, typer.Option("--cross", help="Also convert cross-attention.")] = False,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Calibration text, plain or .xz or .gz; may be repeated. Without it nothing is measured."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a calibration sequence; by default 256, or the context.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of it at a time; by default 8.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of calibration text, at most; by default 200,000.")] = None,
    repair: Annotated[str, typer.Option(help="Stages of repair, any of them in this order: transfer,align,lora.")] = "",
    transfer_steps: Annotated[int | None, typer.Option(help="Steps of attention transfer, at most; by default 300.")] = None,
    align_steps: Annotated[int | None, typer.Option(help="Steps of alignment, at most; by default 300.")] = None,
    lora_steps: Annotated[int | None, typer.Option(help="Steps of low-rank finetuning, at most; by default 300.")] = None,
    transfer_lr: Annotated[float | None, typer.Option(help="Learning rate of attention transfer; by default 0.01.")] = None,
    align_lr: Annotated[float | None, typer.Option(help="Learning rate of alignment; by default 0.001.")] = None,
    lora_lr: Annotated[
        float | None, typer.Option(help="Learning rate of low-rank finetuning; by default 0.001, less beyond a rank of 8.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Minutes of each stage, at most.")] = None,
    loss: Annotated[str | None, typer.Option(help="Of low-rank finetuning: language, distil or embedding.")] = None,
    rank: Annotated[int | None, typer.Option(help="Of alignment and low-rank finetuning; by default 8.")] = None,
    targets: Annotated[
        str | None, typer.Option(help="What both of these change: attention, the default, or all linear maps of the layers.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of the repair: fp32, the default, or bf16 for mixed precision.")
    ] = None,
    keep: Annotated[int, typer.Option(help="Search so many layers that are best left softmax, before the repair.")] = 0,
    beyond_context: Annotated[
        bool, typer.Option("--beyond-context", help="Take prompts longer than the model's context.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of new weights and of the order of batches.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Threads; by default as many as PyTorch takes.", min=1)] = None,
    report: Annotated[bool, typer.Option("--report", help="Write the page, report.html.")] = False,
    out: Annotated[Path, typer.Option(parser=folder_named, help="Folder of the conversion.")] = Path("subquad-convert"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is unfinished in the folder.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, and remove the conversion in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Swap a pretrained model's attention, measure what that breaks, repair it and save it."""
    from subquad.conversion.plan import Plan
    from subquad.conversion.results import as_json as written
    from subquad.conversion.run import run

    if resume and fresh:
        raise InputError("--resume goes on, and --fresh starts over; got both. Pass one of them.")
    if report and not text:
        raise InputError("the page shows what a conversion has lost, measured on text; got none. Pass --text FILE.")
    if report:
        load_extra("report", "a page", "jinja2", "altair", "vl_convert")
    plan = Plan(
        model=model, method=with_values(method, option or []), gguf=gguf, layers=_layers(layers),
        keep_softmax=_numbers("--keep-softmax", keep_softmax), cross=cross, beyond_context=beyond_context,
        text=tuple(text or ()), length=length, batch=batch, tokens=tokens,
        repair=tuple(stage.strip() for stage in repair.split(",") if stage.strip()), keep=keep, transfer_steps=transfer_steps,
        align_steps=align_steps, lora_steps=lora_steps, transfer_lr=transfer_lr, align_lr=align_lr, lora_lr=lora_lr,
        minutes=minutes, loss=loss, rank=rank, targets=targets,
        precision=precision,  # type: ignore[arg-type]
        dtype=dtype, seed=seed, threads=threads,
    )  # fmt: skip

    with Bar() as bar:
        try:
            results = run(plan, out, resume=resume, fresh=fresh, on_progress=bar.show)
        except KeyboardInterrupt:
            Console(stderr=True).print(
                f"Stopped. What was done is kept in {escape(str(out))}; the same command with --resume goes on from it.",
                soft_wrap=True,
            )
            raise typer.Exit(130) from None
    places = _written(results, out, report)
    if as_json:
        typer.echo(written(results))
    else:
        _print(results, places)


def _layers(text: str) -> str | tuple[int, ...]:
    return text if text == "all" or text.startswith("every ") else _numbers("--layers", text, "all, every 2, or ")


def _numbers(name: str, text: str, others: str = "") -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise OptionError(f"{name} is {others}numbers of layers such as 0,3,5; got {text!r}.") from None


def _written(results: Any, out: Path, report: bool) -> list[Path]:
    from subquad.conversion.results import FILE
    from subquad.conversion.run import MODEL, PAGE

    places = [out / MODEL, out / FILE]
    if report:
        from subquad.report.conversion import write_conversion_page

        write_conversion_page(results, out / PAGE)
        places.append(out / PAGE)
    return places


def _print(results: Any, places: list[Path]) -> None:
    from subquad.report.conversion import headline, heads, summary

    console = Console(highlight=False)
    console.print(escape(headline(results)), style="bold", soft_wrap=True)
    if results.last is not None:
        print_table(console, summary(results))
    if results.last is not None and results.last.heads:
        console.print("The heads with the most damage:")
        print_table(console, heads(results, _WORST))
    if not any(places[0].glob("tokenizer*")):
        console.print("There is no tokenizer beside the model, so none was saved.", style="dim", soft_wrap=True)
    console.print("Written: " + ", ".join(map(str, places)), soft_wrap=True)
