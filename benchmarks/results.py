"""Trains every mechanism on every task of docs/results.md, and writes that page and the README's scores. It takes hours, and
can be stopped and started again at any time.

    make results                                                        # all of it
    python benchmarks/results.py --list                                 # the cells, their progress, and their expected time
    python benchmarks/results.py --only cifar10,recall --minutes 60     # a session of an hour
    python benchmarks/results.py --methods linear,softmax --jobs 1
    python benchmarks/results.py --times                                # the step times; nothing else should be running

A cell is one training run, `subquad train` with one method on one thread; `suite/cells.py` declares them. Two run in
parallel, each with its own process and folder. Finished cells are never run again, and stopped ones resume from their
checkpoint: after Ctrl-C, SIGTERM or --minutes exactly where they stopped, after a kill or a power failure at most a tenth
of their steps earlier. A failure is recorded with the reason, and the cell is tried again by the next start; the other
cells continue.

After every cell its record is written to benchmarks/results.json, from which the page is made. Records with other settings
than the declared ones are not used, and their cells are run again. Data comes from --data or SUBQUAD_DATA, or else from its
public source.

With --times nothing is trained. All rows of a table take steps in turns, in this process, and the page shows those times,
with ratios by round: see suite/times.py. The times of a table are written to times.json beside results.json when it is
done; a second start measures only what is missing.
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
from benchmarks.suite.session import Session

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
    parser.add_argument("--minutes", type=float, help="stop all cells after this time")
    parser.add_argument("--jobs", type=int, default=2, help="cells in parallel (2)")
    parser.add_argument("--data", help="folder with local copies of data; by default SUBQUAD_DATA, or the public source")
    parser.add_argument("--list", action="store_true", help="print the cells, their state and expected minutes; run none")
    parser.add_argument("--times", action="store_true", help="measure step times instead of training")
    parser.add_argument("--rounds", type=int, default=25, help="with --times: steps of each row (25)")
    parser.add_argument("--again", action="store_true", help="with --times: also measure tables again")
    parser.add_argument("--out", type=Path, default=Path("subquad-results"), help="folder of the runs (subquad-results)")
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
            parser.error(f"--only must name tables, or their part before the dash: {', '.join(names)}; got {word}")
    for word in options.methods:
        if word not in sq.methods():
            parser.error(f"--methods must be among {', '.join(sq.methods())}; got {word}")
    for name in ("jobs", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be an integer of at least 1; got {getattr(options, name)}")
    if options.times and (options.methods or options.list):
        parser.error("--times measures all rows of a table in turns; leave out --methods and --list")
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes must be a number above 0; got {options.minutes}")
    for path in (options.results, options.page):
        if not path.resolve().parent.is_dir():
            parser.error(f"{path} must be in an existing directory")
    return options


def run(options: argparse.Namespace) -> int:
    """The exit code: 1 if a cell has failed, 130 after Ctrl-C."""
    tables = [t for t in cells.TABLES if not options.only or any(_is_named(t.name, word) for word in options.only)]
    console = Console(highlight=False)
    bar = Bar()
    if options.times:
        return _time_steps(console, bar, tables, options)
    chosen = cells.selected(tables, options.methods)
    if not chosen:
        raise sq.InputError("no cell has these tables and methods. Pass others, or measure step times with --times.")
    session = Session(
        chosen, options.out, options.results, options.jobs, options.data, options.minutes,
        on_record=partial(_on_record, console, options), on_progress=partial(_on_progress, bar),
    )  # fmt: skip
    if options.list:
        _list(console, session)
        return 0
    is_stopped = False
    with exclusive(options.out, "run of the suite"), bar:
        session.collect()
        _write_page(options)
        try:
            session.run()
        except KeyboardInterrupt:
            is_stopped = True
    done = session.done()
    rest = "" if done == len(chosen) else " The same command continues with the rest."
    console.print(f"{done} of {len(chosen)} cells are done.{rest}")
    console.print(f"Written: {options.results}, {options.page}", soft_wrap=True)
    return 130 if is_stopped else int(any(record["status"] != "done" for record in session.found.values()))


def _time_steps(console: Console, bar: Bar, tables: Sequence[Table], options: argparse.Namespace) -> int:
    """The exit code: 1 if a row was left out, 130 after Ctrl-C."""
    path = times.beside(options.results)
    if not options.results.exists():
        records.save(options.results, {})
    is_whole = True
    with bar:
        for table in tables:
            if not options.again and times.is_measured(table, times.read(path).get(table.name), options.rounds):
                console.print(f"{table.name}: already measured")
                continue
            on_progress = partial(_show_rounds, bar, table)
            try:
                timed = times.measure(table, options.rounds, options.data, options.command, on_progress)
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


def _on_record(console: Console, options: argparse.Namespace, cell: Cell, record: Saved) -> None:
    _write_page(options)
    if record["status"] == "done":
        said = f"{record['metric']} {record['score']:.4g}, {record['seconds'] / 60:.1f} min"
    else:
        said = f"{record['status']}: {record['why']}"
    console.print(f"{cell.name}: {said}", markup=False, soft_wrap=True)


def _on_progress(bar: Bar, session: Session) -> None:
    at = [(cell.name, *session.progress(cell)) for cell, _ in session.running.values()]
    doing = ", ".join(f"{name} {step:,}/{steps:,}" if steps else name for name, step, steps in at)
    done, count = session.done(), len(session.cells)
    bar.show(Progress(f"{done} of {count} done; {doing}", done / count, 60 * session.minutes_left()))


def _list(console: Console, session: Session) -> None:
    session.read()
    table = new_table("", "cell", "state", "minutes", "taken")
    for cell in session.cells:
        taken = session.found.get(cell.name, {}).get("seconds")
        minutes = f"{taken / 60:.1f}" if taken else ""
        table.add_row(cell.name, _state(session, cell), f"{session.expected(cell):.1f}", minutes)
    console.print(table)
    left = duration(60 * session.minutes_left())
    console.print(f"{session.done()} of {len(session.cells)} cells are done; about {left} left, {session.jobs} in parallel.")


def _state(session: Session, cell: Cell) -> str:
    if cell.name in session.found:
        return str(session.found[cell.name]["status"])
    step, steps = session.progress(cell)
    if step:
        return f"at step {step:,} of {steps:,}"
    return "waiting: other settings" if cell in session.changed else "waiting"


if __name__ == "__main__":
    main()
