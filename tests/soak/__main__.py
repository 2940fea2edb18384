"""The command line of the soak test; `python -m tests.soak --help`."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from subquad.errors import SubquadError
from subquad.runs.lock import exclusive
from tests.soak import FINDINGS, NATIVE, PARTS, report
from tests.soak.run import Settings, run_one, run_part


def main(arguments=None):
    start, options, console = time.monotonic(), parser().parse_args(arguments), Console()
    if options.report:
        report.update_page(options.report, options.out)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    parts = chosen_parts(options.part)
    if options.only is not None:
        return show_one(options, parts, console)
    with exclusive(options.out, "soak test"):
        return run(options, parts, console, start)


def run(options, parts, console, start):
    for number, part in enumerate(parts):
        deadline = float("inf")
        if options.minutes is not None:  # each part gets an equal share of what is left
            now = time.monotonic()
            deadline = now + (start + 60 * options.minutes - now) / (len(parts) - number)
        with progress_bar(console) as shown:
            settings = settings_of(options, part, deadline)
            task = shown.add_task(part, total=settings.cases if settings.cases < sys.maxsize else None, note="")
            found = run_part(settings, lambda found, task=task, shown=shown: advance(shown, task, found))
        if found.was_stopped:
            break
    results = report.write_results(options.out, options.seed)
    of_parts = {**results, "parts": {part: results["parts"][part] for part in parts if part in results["parts"]}}
    report.show(of_parts, console)
    console.print(f"Results: {options.out / 'results.json'}")
    return 1 if report.has_findings(of_parts) else 0


def parser():
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Soak test; see docs/reliability.md.")
    names = f"{', '.join([*PARTS, 'native'])}; separate several by commas; native means {', '.join(NATIVE)}; default: all"
    parser.add_argument("--part", action="append", help=names)
    parser.add_argument("--seed", type=int, default=0, help="the seed of all cases; default: 0")
    parser.add_argument("--minutes", type=positive, help="stop after this many minutes, divided among the parts")
    total = "cases per part in total, earlier runs included; default: set by the part, or no limit with --minutes"
    parser.add_argument("--cases", type=count, help=total)
    parser.add_argument("--workers", type=count, default=os.cpu_count() or 1, help="worker processes; default: one per core")
    parser.add_argument("--out", type=Path, default=Path("soak-results"), help="results folder; a run resumes what is there")
    parser.add_argument(
        "--retry", action="store_true", help="run the cases of earlier findings again, with the code as it is now"
    )
    parser.add_argument("--only", type=index, metavar="INDEX", help="repeat this one case, and show how it ends")
    parser.add_argument("--report", type=Path, metavar="PAGE", help="run nothing; write the results into PAGE and a JSON file")
    return parser


def index(text):
    """For argparse: an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0; got {text!r}")
    return int(text)


def count(text):
    """For argparse: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1; got {text!r}")
    return int(text)


def positive(text):
    """For argparse: a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text!r}")
    return number


def chosen_parts(names):
    found = []
    for name in ",".join(names or ["cases,kills,files,native"]).split(","):
        if name != "native" and name not in PARTS:
            raise SystemExit(f"--part must be one of {', '.join([*PARTS, 'native'])}; got {name!r}.")
        found += NATIVE if name == "native" else [name]
    return list(dict.fromkeys(found))


def settings_of(options, part, deadline=float("inf")):
    """With --minutes and no --cases, there is no other limit."""
    default = sys.maxsize if options.minutes is not None else getattr(import_module(PARTS[part]), "COUNT", 1000)
    cases = default if options.cases is None else options.cases
    return Settings(part, options.seed, options.out.resolve(), cases, deadline, options.workers, options.retry)


def show_one(options, parts, console):
    verdicts = []
    for part in parts:
        result = run_one(settings_of(options, part), options.only)
        verdicts.append(result["verdict"])
        console.print(f"{part}: {result['verdict']}, {result.get('labels', {})}", markup=False)
        if result["verdict"] in FINDINGS:
            report.show_finding({**result, "index": options.only}, console)
    return 1 if set(verdicts) & set(FINDINGS) else 0


def progress_bar(console):
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def advance(shown, task, found):
    findings = sum(found.verdicts.get(verdict, 0) for verdict in FINDINGS)
    shown.update(task, completed=found.done, note=f"{findings} findings" if findings else "")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (SubquadError, OSError) as error:
        sys.exit(f"error: {error}")
