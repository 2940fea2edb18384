"""Trains every mechanism on every task of docs/results.md, and writes that page and the README's scores. Hours; stop it and
start it again as you like.

    make results                                                        # all of it
    python benchmarks/results.py --list                                 # the cells, how far each is, and what it will take
    python benchmarks/results.py --only cifar10,recall --minutes 60     # a sitting of an hour
    python benchmarks/results.py --methods linear,softmax --jobs 1
    python benchmarks/results.py --times                                # the step times, when nothing else runs

A cell is one training, `subquad train` with one method on one thread; `suite/cells.py` declares them. Two run side by side,
each in a process and a folder of its own. What is finished is never run again; what was stopped goes on from its checkpoint:
after Ctrl-C, SIGTERM or the end of the minutes from where it was, after a kill or a loss of power from at most a tenth of its
steps before. What fails is recorded with the reason, and tried again by the next start; the others go on.

After every cell its record is written to benchmarks/results.json, and the page is made from that. Records whose settings are
not those declared now are not used: their cells are run again. Data comes from --data or SUBQUAD_DATA, or else from its public
source.

With --times nothing is trained. All rows of a table take steps in turns, in this process, and the page has those times, with
ratios by round: see suite/times.py. A table is written to times.json beside results.json when it is done; started again, only
what is missing is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

import subquad as sq
from subquad.cli.terminal import Bar, duration
from subquad.runs.files import write_atomically
from subquad.runs.lock import exclusive
from subquad.runs.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks import docs
from benchmarks.common import command, new_table
from benchmarks.suite import cells, page, records, times
from benchmarks.suite.cells import Cell, Table
from benchmarks.suite.records import Saved
from benchmarks.suite.sitting import Sitting

RESULTS = docs.ROOT / "benchmarks" / "results.json"


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        sys.exit(run(parse(arguments)))
    except (sq.SubquadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tables, separated by commas: cifar10,recall or cifar10,recall-64")
    parser.add_argument("--methods", default="", help="methods, separated by commas")
    parser.add_argument("--minutes", type=float, help="after these nothing is started, and what runs is stopped")
    parser.add_argument("--jobs", type=int, default=2, help="cells side by side (2)")
    parser.add_argument("--data", help="folder with local copies of data; by default SUBQUAD_DATA, or the public source")
    parser.add_argument("--list", action="store_true", help="print the cells, their state and expected minutes, and run none")
    parser.add_argument("--times", action="store_true", help="measure the time of a step rather than train")
    parser.add_argument("--rounds", type=int, default=25, help="with --times: steps of each row (25)")
    parser.add_argument("--again", action="store_true", help="with --times: also the tables that have been measured")
    parser.add_argument("--out", type=Path, default=Path("subquad-results"), help="folder of the trainings (subquad-results)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the records (benchmarks/results.json)")
    parser.add_argument("--page", type=Path, default=docs.RESULTS, help="file of the page (docs/results.md)")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    options.command = command(__file__, given)
    names = [table.name for table in cells.TABLES]
    options.only, options.methods = (
        [word.strip() for word in text.split(",") if word.strip()] for text in (options.only, options.methods)
    )
    for word in options.only:
        if not any(_is_named(name, word) for name in names):
            parser.error(f"--only names tables: {', '.join(names)}, or what stands before the dash; got {word}")
    for word in options.methods:
        if word not in sq.methods():
            parser.error(f"--methods are of {', '.join(sq.methods())}; got {word}")
    for name in ("jobs", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is a whole number of at least 1; got {getattr(options, name)}")
    if options.times and (options.methods or options.list):
        parser.error("--times measures all rows of a table in turns; leave --methods and --list out")
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes is a number above 0; got {options.minutes}")
    for path in (options.results, options.page):
        if not path.resolve().parent.is_dir():
            parser.error(f"{path} must be in a directory that exists")
    return options


def run(options: argparse.Namespace) -> int:
    """The exit code: 1 where a cell has failed, 130 after Ctrl-C."""
    tables = [t for t in cells.TABLES if not options.only or any(_is_named(t.name, word) for word in options.only)]
    console = Console(highlight=False)
    bar = Bar()
    if options.times:
        return _time_steps(console, bar, tables, options)
    chosen = cells.selected(tables, options.methods)
    if not chosen:
        raise sq.InputError("nothing is trained for these tables and methods. Step times are measured with --times.")
    sitting = Sitting(
        chosen, options.out, options.results, options.jobs, options.data, options.minutes,
        ended=partial(_tell, console, options), show=partial(_show, bar),
    )  # fmt: skip
    if options.list:
        _list(console, sitting)
        return 0
    is_stopped = False
    with exclusive(options.out, "run of the suite"), bar:
        sitting.collect()
        _write_page(options)
        try:
            sitting.run()
        except KeyboardInterrupt:
            is_stopped = True
    done = sitting.done()
    goes_on = "" if done == len(chosen) else " The same command goes on with the rest."
    console.print(f"{done} of {len(chosen)} cells are done.{goes_on}")
    console.print(f"Written: {options.results}, {options.page}", soft_wrap=True)
    return 130 if is_stopped else int(any(record["status"] != "done" for record in sitting.found.values()))


def _time_steps(console: Console, bar: Bar, tables: Sequence[Table], options: argparse.Namespace) -> int:
    """The exit code: 1 where a row was left out, 130 after Ctrl-C."""
    path = times.beside(options.results)
    if not options.results.exists():
        records.save(options.results, {})
    is_whole = True
    with bar:
        for table in tables:
            if not options.again and times.is_measured(table, times.read(path).get(table.name), options.rounds):
                console.print(f"{table.name}: measured before")
                continue
            show = partial(_show_rounds, bar, table)
            try:
                timed = times.measure(table, options.rounds, options.data, options.command, show)
            except KeyboardInterrupt:
                return 130
            times.merge(path, table, timed)
            _write_page(options)
            is_whole &= not timed["left_out"]
            console.print(f"{table.name}: {len(timed['rows'])} rows, {timed['rounds']} rounds")
            for label, why in timed["left_out"].items():
                console.print(f"{table.name}/{label}: left out: {why}", markup=False, soft_wrap=True)
    console.print(f"Written: {path}, {options.page}", soft_wrap=True)
    return int(not is_whole)


def _show_rounds(bar: Bar, table: Table, done: int, count: int) -> None:
    bar.show(Progress(f"{table.name}, round {done} of {count}", done / count))


def _is_named(table: str, word: str) -> bool:
    return table == word or table.startswith(f"{word}-")


def _write_page(options: argparse.Namespace) -> None:
    timed = times.read(times.beside(options.results))
    section = {options.results.stem: lambda found: page.section(found, timed)}
    pages: dict[Path, docs.Sections] = {options.page: section}
    if options.page == docs.RESULTS:
        pages[docs.README] = {options.results.stem: page.overview}
    for path, sections in pages.items():
        write_atomically(path, docs.filled(path, sections, options.results.parent).encode())


def _tell(console: Console, options: argparse.Namespace, cell: Cell, record: Saved) -> None:
    _write_page(options)
    if record["status"] == "done":
        said = f"{record['metric']} {record['score']:.4g}, {record['seconds'] / 60:.1f} min"
    else:
        said = f"{record['status']}: {record['why']}"
    console.print(f"{cell.name}: {said}", markup=False, soft_wrap=True)


def _show(bar: Bar, sitting: Sitting) -> None:
    at = [(cell.name, *sitting.progress(cell)) for cell, _ in sitting.running.values()]
    doing = ", ".join(f"{name} {step:,}/{steps:,}" if steps else name for name, step, steps in at)
    done, count = sitting.done(), len(sitting.cells)
    bar.show(Progress(f"{done} of {count} done; {doing}", done / count, 60 * sitting.left()))


def _list(console: Console, sitting: Sitting) -> None:
    sitting.read()
    table = new_table("", "cell", "state", "minutes", "taken")
    for cell in sitting.cells:
        taken = sitting.found.get(cell.name, {}).get("seconds")
        minutes = f"{taken / 60:.1f}" if taken else ""
        table.add_row(cell.name, _state(sitting, cell), f"{sitting.expected(cell):.1f}", minutes)
    console.print(table)
    left = duration(60 * sitting.left())
    console.print(f"{sitting.done()} of {len(sitting.cells)} cells are done; about {left} left, {sitting.jobs} side by side.")


def _state(sitting: Sitting, cell: Cell) -> str:
    if cell.name in sitting.found:
        return str(sitting.found[cell.name]["status"])
    step, steps = sitting.progress(cell)
    if step:
        return f"at step {step:,} of {steps:,}"
    return "waiting: other settings" if cell in sitting.changed else "waiting"


if __name__ == "__main__":
    main()
