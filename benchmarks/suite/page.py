"""docs/results.md: all scores in one table, then each table of `cells`, from the records."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import subquad as sq
from benchmarks.common import describe, markdown
from benchmarks.suite import cells, records, times
from benchmarks.suite.cells import Row, Table
from benchmarks.suite.options import changed_options
from benchmarks.suite.records import Saved
from benchmarks.suite.times import Timed
from subquad.report import figures
from subquad.tasks import TASKS, Settings

_MAX_REASON = 200  # characters
_PERCENT = ("accuracy",)  # figures shown in percent


@dataclass(frozen=True)
class Filled:
    """A row with the records of its cells, and the time of its step if that was measured."""

    row: Row
    records: list[Saved]
    time: dict[str, Any] | None

    @property
    def done(self) -> list[Saved]:
        return [record for record in self.records if record["status"] == "done"]

    @property
    def why(self) -> str:
        """Why it has no figures."""
        if not self.records:
            return "not run yet"
        record = self.records[0]
        why = record["why"].split(";")[0] if record["status"] == "diverged" else record["why"]
        return f"{record['status']}: {why[:_MAX_REASON]}"

    def median(self, name: str) -> float | None:
        values = [record[name] for record in self.done if record.get(name) is not None]
        return statistics.median(values) if values else None


Column = Callable[[Filled], str]


def section(found: dict[str, Any], timed: dict[str, Timed]) -> str:
    """The generated part of the page: `found` is results.json, `timed` has the step times by table."""
    saved: dict[str, Saved] = found["records"]
    every = cells.selected(cells.TABLES, [])
    done = sum(records.is_final(records.of(cell, saved)) for cell in every)
    parts = [_table(table, saved, timed.get(table.name)) for table in cells.TABLES]
    return "\n\n".join([f"{done} of {len(every)} training runs are complete.", overview(found), *parts])


def overview(found: dict[str, Any]) -> str:
    """The scores of all tables that compare methods, with a row per method and a column per table."""
    tables = [table for table in cells.TABLES if table.is_trained and not table.variants]
    rows = {table.name: {row.label: _filled(row, found["records"], None) for row in table.rows()} for table in tables}
    heads = [f"`{table.name}`, {TASKS[table.task].info.metric}" for table in tables]
    shown = [
        [f"`{method}`", *(_brief(table, rows[table.name].get(method), method) for table in tables)]
        for method in sq.methods()
        if any(method in of_table for of_table in rows.values())
    ]
    return "\n".join(markdown(["method", *heads], shown))


def _brief(table: Table, row: Filled | None, method: str) -> str:
    """A score, or one word on why there is none; the table itself has the reason."""
    if row is None:
        return "no" if method in table.refused() else "-"
    if not row.done:
        return row.records[0]["status"] if row.records else "not run yet"
    return _scores(row, TASKS[table.task].info.metric)


def _table(table: Table, saved: dict[str, Saved], timed: Timed | None) -> str:
    rows = [_filled(row, saved, timed) for row in table.rows()]
    columns = _columns(table, rows[0])
    with_figures = _ordered(table, rows)
    shown = [[f"`{row.row.label}`", *(column(row) for column in columns.values())] for row in with_figures]
    shown += [_without_scores(row, columns) for row in rows if row not in with_figures]
    empty = [""] * (len(columns) - 1)
    shown += [[f"`{method}`", f"no: {_escaped(why)}", *empty] for method, why in table.refused().items()]
    lines = [f"## {table.title}", "", table.about, "", *markdown(["run" if table.variants else "method", *columns], shown)]
    done = [(row.row.label, record) for row in rows for record in row.done]
    return "\n".join([*lines, "", *_under(table, done, timed)])


def _without_scores(row: Filled, columns: dict[str, Column]) -> list[str]:
    """The reason, and figures of the step if they were measured."""
    _, *others = columns.items()
    steps = [
        column(row) if row.time is not None and name.startswith(("step", "time vs.", "memory vs.")) else ""
        for name, column in others
    ]
    return [f"`{row.row.label}`", _escaped(row.why), *steps]


def _filled(row: Row, saved: dict[str, Saved], timed: Timed | None) -> Filled:
    return Filled(row, [r for cell in row.cells if (r := records.of(cell, saved)) is not None], times.of(row, timed))


def _ordered(table: Table, rows: Sequence[Filled]) -> list[Filled]:
    """The rows with figures: sorted by score if the table compares methods, otherwise as declared."""
    if not table.is_trained:
        return list(rows)
    done = [row for row in rows if row.done]
    if table.variants:
        return done
    return sorted(
        done, key=lambda row: _mean(row, TASKS[table.task].info.metric), reverse=TASKS[table.task].info.higher_is_better
    )


def _columns(table: Table, base: Filled) -> dict[str, Column]:
    """The columns by heading; ratios are to the first declared row."""
    metric, first = TASKS[table.task].info.metric, f"`{base.row.label}`"
    step: dict[str, Column] = {
        "step time": lambda row: _timed(row, figures.duration),
        f"time vs. {first}": lambda row: _time_ratio(row, base),
        "step memory": lambda row: "-" if row.time is None else figures.size(row.time["bytes"]),
        f"memory vs. {first}": lambda row: _memory_ratio(row, base),
    }
    if not table.is_trained:
        steps = table.settings.steps or 0
        return {**step, f"{steps:,} steps, projected": lambda row: _timed(row, lambda s: f"{s * steps / 60:,.0f} min")}
    options = {} if table.variants else {"options": _options}
    return {
        metric: lambda row: _scores(row, metric),
        "loss": lambda row: _scores(row, "loss"),
        **step,
        "parameters": lambda row: _shown(row.median("parameters"), "{:,.0f}".format),
        "minutes": lambda row: _shown(row.median("seconds"), lambda seconds: f"{seconds / 60:.1f}"),
        **options,
    }


def _options(row: Filled) -> str:
    return ", ".join(f"{name}={value}" for name, value in changed_options(row.row.cells[0].mechanism).items())


def _mean(row: Filled, figure: str) -> float:
    return statistics.mean(record["test"][figure] for record in row.done)


def _scores(row: Filled, figure: str) -> str:
    """The mean over seeds, with the range."""
    values = [record["test"][figure] for record in row.done]
    shown = "{:.1%}".format if figure in _PERCENT else lambda value: f"{value:#.4g}".rstrip(".")
    if len(row.row.cells) == 1:
        return shown(values[0])
    missing = "" if len(values) == len(row.row.cells) else f", {len(values)} of {len(row.row.cells)} seeds"
    return f"{shown(statistics.mean(values))} ({shown(min(values))} to {shown(max(values))}{missing})"


def _timed(row: Filled, written: Callable[[float], str]) -> str:
    return "-" if row.time is None else written(row.time["milliseconds"] / 1e3)


def _time_ratio(row: Filled, base: Filled) -> str:
    if row.time is None or row.row == base.row:
        return "-" if row.time is None else "1"
    low, high = row.time["of_base_80_percent"]
    return f"{row.time['of_base']:.2f} ({low:.2f} to {high:.2f})"


def _memory_ratio(row: Filled, base: Filled) -> str:
    return "-" if row.time is None or base.time is None else f"{row.time['bytes'] / base.time['bytes']:.2f}"


def _shown(value: float | None, written: Callable[[float], str]) -> str:
    return "-" if value is None else written(value)


def _under(table: Table, done: Sequence[tuple[str, Saved]], timed: Timed | None) -> list[str]:
    """Settings, commands and machines, one line each."""
    method = "METHOD" if len(table.methods) != 1 else table.methods[0]
    line = shlex.join(["subquad", *cells.command(table.task, method, table.given), "--threads", str(cells.THREADS)])
    seeds = ", ".join(map(str, table.seeds))
    others = "".join(f", {name} {value}" for name, value in table.given.items() if name in ("precision", "checkpointing"))
    lines = [f"Settings: {_settings(table.settings)}{others}; seed{'s' if len(table.seeds) > 1 else ''} {seeds}."]
    if table.is_trained:
        options = "the options in its name" if table.variants else "its options as `--method-option name=value`"
        lines.append(f"Command for a row: `{line}`, with {options}.")
        lines.append(f"Command for the table: `python benchmarks/results.py --only {table.name}`.")
    else:
        lines.append(f"Projected: the time of a step times the number of steps of `{line}`.")
    where: dict[str, list[str]] = {}
    for label, record in done:
        at = describe({**record["machine"], "threads": record["threads"]})
        jobs = f"{record['jobs']} training runs in parallel" if record["jobs"] > 1 else "one training run at a time"
        where.setdefault(f"{at}; {jobs}; commit {record['commit'] or 'unknown'}.", []).append(label)
    for place, labels in where.items():
        which = "" if len(where) == 1 else f" ({', '.join(f'`{name}`' for name in dict.fromkeys(labels))})"
        lines.append(f"Trained on: {place}{which}")
    return [f"- {line}" for line in [*lines, _steps(table, timed)]]


def _steps(table: Table, timed: Timed | None) -> str:
    """Where step times come from, or how to measure them."""
    line = f"python benchmarks/results.py --times --only {table.name}"
    if timed is None:
        return f"Step times have not been measured yet. Command: `{line}`."
    if not times.is_measured(table, timed, rounds=1):
        return f"Some step times (`-`) were measured with other settings and are not shown. Command: `{line}`."
    left_out = "".join(f" Left out: `{label}`, {_escaped(why)}." for label, why in timed["left_out"].items())
    at = f"{describe(timed['machine'])}; commit {timed['machine']['commit'] or 'unknown'}"
    return f"Step times: `{line} --rounds {timed['rounds']}`, on {at}.{left_out}"


def _settings(settings: Settings) -> str:
    given = {name: value for name, value in asdict(settings).items() if name not in ("seed", "options") and value is not None}
    words = [f"{name.replace('_', ' ')} {value:,}" for name, value in given.items()]
    return ", ".join([*words, *(f"{name} {value}" for name, value in settings.options)])


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
