"""`subquad convert`: convert a pretrained model, print what it lost and what the repair regained, and write the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console

from subquad.cli.terminal import Bar, as_text, folder_named, named_values, print_table, with_values
from subquad.errors import InputError, OptionError, closest, load_extra

_WORST = 10  # heads that are printed
_EXAMPLE = "--repair-option lora.steps=500"


def convert(
    model: Annotated[str, typer.Argument(help="A folder with a Hugging Face model, or its name on the hub.")],
    method: Annotated[str, typer.Option(help="A name from 'subquad list'.")],
    option: Annotated[list[str] | None, typer.Option(help="An option of the method, such as window=64; repeatable.")] = None,
    gguf: Annotated[str | None, typer.Option(help="The name of a GGUF file inside MODEL.")] = None,
    layers: Annotated[str, typer.Option(help="all, layer numbers such as 0,3,5, or every k such as 'every 2'.")] = "all",
    keep_softmax: Annotated[str, typer.Option(help="Layer numbers to keep as softmax, such as 0,5.")] = "",
    cross: Annotated[bool, typer.Option("--cross", help="Convert cross-attention, too.")] = False,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Calibration text, plain, .xz or .gz; repeatable. Without it nothing is measured."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Length of a calibration sequence; by default 256, or the context if it is shorter.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Calibration sequences per batch; by default 8.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Largest number of calibration tokens; by default 200,000.")] = None,
    repair: Annotated[str, typer.Option(help="Stages of repair, in this order: transfer,align,lora, or some of them.")] = "",
    repair_option: Annotated[
        list[str] | None,
        typer.Option(
            help="An option of the repair: steps, lr, minutes or precision (fp32, bf16); of align and lora also rank and "
            "targets (attention, all); of lora also loss (language, distil, embedding). As rank=16 for all stages that have "
            "it, or as lora.steps=500 for one stage; repeatable."
        ),
    ] = None,
    keep: Annotated[int, typer.Option(help="Before the repair, search for this many layers that are best kept softmax.")] = 0,
    beyond_context: Annotated[
        bool, typer.Option("--beyond-context", help="Accept prompts longer than the context of the model.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of new weights and of the order of batches.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Number of threads; by default PyTorch's.", min=1)] = None,
    report: Annotated[bool, typer.Option("--report", help="Write an HTML report, report.html.")] = False,
    out: Annotated[Path, typer.Option(parser=folder_named, help="Folder of the conversion.")] = Path("subquad-convert"),
    resume: Annotated[bool, typer.Option("--resume", help="Resume the unfinished conversion in the folder.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, and remove the conversion in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Replace the attention of a pretrained model, measure the damage, repair it and save the model."""
    from subquad.conversion.plan import Plan, Source, Swap, Text
    from subquad.conversion.results import as_json as to_json
    from subquad.conversion.run import run

    if resume and fresh:
        raise InputError("--resume continues a conversion, and --fresh starts over; got both. Pass one of them.")
    if report and not text:
        raise InputError("--report needs measurements on calibration text; got no --text. Pass --text FILE.")
    if report:
        load_extra("report", "the HTML report", "jinja2", "altair", "vl_convert")
    plan = Plan(
        source=Source(model=model, gguf=gguf, dtype=dtype),
        swap=Swap(
            method=with_values(method, option or []), layers=_layers(layers),
            keep_softmax=_numbers("--keep-softmax", keep_softmax), cross=cross, beyond_context=beyond_context, keep=keep,
        ),
        text=Text(files=tuple(text or ()), length=length, batch=batch, tokens=tokens),
        repair=parse_repair(repair, repair_option or []),
        seed=seed,
        threads=threads,
    )  # fmt: skip
    with Bar() as bar:
        try:
            results = run(plan, out, resume=resume, fresh=fresh, on_progress=bar.show)
        except KeyboardInterrupt:
            Console(stderr=True).print(
                f"Stopped. What was done is kept in {as_text(out)}; the same command with --resume continues.",
                soft_wrap=True,
            )
            raise typer.Exit(130) from None
    paths = _write_page(results, out, report)
    if as_json:
        typer.echo(to_json(results))
    else:
        _print(results, paths)


def _layers(text: str) -> str | tuple[int, ...]:
    return text if text == "all" or text.startswith("every ") else _numbers("--layers", text, "all, every 2, or ")


def _numbers(name: str, text: str, others: str = "") -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise OptionError(f"{name} must be {others}layer numbers such as 0,3,5; got {text!r}.") from None


def parse_repair(text: str, options: Sequence[str]) -> Any:
    """The stages of --repair with the options of --repair-option."""
    from subquad.conversion.plan import STAGES, Repair

    chosen = [stage.strip() for stage in text.split(",") if stage.strip()]
    if chosen != [stage for stage in STAGES if stage in chosen]:
        raise InputError(
            f"--repair must be some of the stages {', '.join(STAGES)}, each once, in that order; got {', '.join(chosen)}."
        )
    given: dict[str, dict[str, Any]] = {stage: {} for stage in chosen}
    named = named_values(options, _EXAMPLE)
    for full in sorted(named, key=lambda name: "." in name):  # an option of one stage overrides the same one of all stages
        stage, _, name = full.rpartition(".")
        readers = _readers(full, stage, name)
        if not set(readers) & set(chosen):
            raise InputError(
                f"--repair-option {full} is for {' and '.join(readers)}, and --repair has no such stage "
                f"({', '.join(chosen) or 'none'}). Leave it out, or add the stage to --repair."
            )
        for reader in set(readers) & set(chosen):
            given[reader][name] = _repair_value(full, named[full], get_type_hints(STAGES[reader])[name])
    stages: dict[str, Any] = {stage: STAGES[stage](**values) for stage, values in given.items()}
    return Repair(**stages)


def _readers(full: str, stage: str, name: str) -> list[str]:
    """The stages that have this option."""
    from subquad.conversion.plan import STAGES

    if stage and stage not in STAGES:
        raise OptionError(
            f"--repair-option {full}: there is no stage {stage!r}{closest(stage, STAGES)} Write it as {_EXAMPLE}."
        )
    options = {known: [field.name for field in fields(STAGES[known])] for known in ([stage] if stage else STAGES)}
    readers = [known for known, names in options.items() if name in names]
    if not readers:
        names = list(dict.fromkeys(name for known in options.values() for name in known))
        whose = f"the stage {stage}" if stage else "the repair"
        raise OptionError(f"{whose} has no option {name!r}{closest(name, names)} Options: {', '.join(names)}.")
    return readers


def _repair_value(name: str, text: str, hint: Any) -> Any:
    kinds = get_args(hint) or (hint,)
    kind = next((kind for kind in (int, float) if kind in kinds), str)
    try:
        return kind(text)
    except ValueError:
        what = "an integer" if kind is int else "a number"
        raise OptionError(f"--repair-option {name} must be {what}; got {text!r}.") from None


def _write_page(results: Any, out: Path, report: bool) -> list[Path]:
    """The files of the conversion; the page is written if `report`."""
    from subquad.conversion.results import FILE
    from subquad.conversion.run import MODEL, PAGE

    paths = [out / MODEL, out / FILE]
    if report:
        from subquad.report.conversion import write_conversion_page

        write_conversion_page(results, out / PAGE)
        paths.append(out / PAGE)
    return paths


def _print(results: Any, paths: list[Path]) -> None:
    from subquad.report.conversion import headline, heads, summary

    console = Console(highlight=False)
    console.print(as_text(headline(results)), style="bold", soft_wrap=True)
    if results.last is not None:
        print_table(console, summary(results))
    if results.last is not None and results.last.heads:
        console.print("The heads with the most damage:")
        print_table(console, heads(results, _WORST))
    if not any(paths[0].glob("tokenizer*")):
        console.print("The model has no tokenizer, so none was saved.", style="dim", soft_wrap=True)
    console.print(as_text("Written: " + ", ".join(map(str, paths))), soft_wrap=True)
