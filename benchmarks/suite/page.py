"""docs/results.md: one table for each that is declared, from the records there are."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import markdown, on
from benchmarks.suite import cells, records
from benchmarks.suite.cells import Row, Table
from benchmarks.suite.records import Saved
from subquad.report import figures
from subquad.tasks import TASKS, Settings

_WORDS = 200  # characters of a reason, at most
_PERCENT = ("accuracy",)  # figures that are shares


@dataclass(frozen=True)
class Filled:
    """A row with the records of its cells."""

    row: Row
    records: list[Saved]

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
        return f"{record['status']}: {why[:_WORDS]}"

    def median(self, name: str) -> float | None:
        values = [record[name] for record in self.done if record.get(name) is not None]
        return statistics.median(values) if values else None


Column = Callable[[Filled], str]


def section(found: dict[str, Any]) -> str:
    """All that stands between the marks."""
    saved: dict[str, Saved] = found["records"]
    every = cells.selected(cells.TABLES, [])
    done = sum(records.is_final(records.of(cell, saved)) for cell in every)
    parts = [_table(table, saved) for table in cells.TABLES]
    return "\n\n".join([f"{done} of {len(every)} trainings have been run.", *parts])


def _table(table: Table, saved: dict[str, Saved]) -> str:
    rows = [Filled(row, [r for cell in row.cells if (r := records.of(cell, saved)) is not None]) for row in table.rows()]
    columns = _columns(table, rows[0])
    shown = [[f"`{row.row.label}`", *(column(row) for column in columns.values())] for row in _ordered(table, rows)]
    empty = [""] * (len(columns) - 1)
    without = {row.row.label: row.why for row in rows if not row.done}
    without |= {method: f"no: {why}" for method, why in table.refused().items()}
    shown += [[f"`{label}`", _escaped(why), *empty] for label, why in without.items()]
    lines = [f"## {table.title}", "", table.about, "", *markdown(["run" if table.variants else "method", *columns], shown)]
    return "\n".join([*lines, "", *_under(table, [record for row in rows for record in row.done])])


def _ordered(table: Table, rows: Sequence[Filled]) -> list[Filled]:
    """Those with figures: of a table about scores the best first, otherwise as declared."""
    done = [row for row in rows if row.done]
    if table.variants or table.projected:
        return done
    return sorted(
        done, key=lambda row: _mean(row, TASKS[table.task].info.metric), reverse=TASKS[table.task].info.higher_is_better
    )


def _columns(table: Table, base: Filled) -> dict[str, Column]:
    """What each column says of a row, by its heading; ratios are to the first row that was declared."""
    metric, first = TASKS[table.task].info.metric, f"of `{base.row.label}`"
    scores: dict[str, Column] = {metric: lambda row: _scores(row, metric), "loss": lambda row: _scores(row, "loss")}
    times: dict[str, Column] = {
        "step time": lambda row: _shown(row.median("step_seconds"), figures.duration),
        f"{first}'s time": lambda row: _ratio(row, base, "step_seconds"),
    }
    costs: dict[str, Column] = {
        "peak memory": lambda row: _shown(row.median("peak_bytes"), figures.size),
        f"{first}'s memory": lambda row: _ratio(row, base, "peak_bytes"),
        "parameters": lambda row: _shown(row.median("parameters"), "{:,.0f}".format),
        "minutes": lambda row: _shown(row.median("seconds"), lambda seconds: f"{seconds / 60:.1f}"),
    }
    if not table.projected:
        return {**scores, **times, **costs}
    heading = f"{table.projected:,} steps, projected"
    return {
        "steps measured": lambda row: _shown(row.median("step"), "{:,.0f}".format),
        **times,
        heading: lambda row: _shown(row.median("step_seconds"), lambda seconds: f"{seconds * table.projected / 60:,.0f} min"),
        **costs,
    }


def _mean(row: Filled, figure: str) -> float:
    return statistics.mean(record["test"][figure] for record in row.done)


def _scores(row: Filled, figure: str) -> str:
    """The mean over seeds, with the least and the greatest."""
    values = [record["test"][figure] for record in row.done]
    shown = "{:.1%}".format if figure in _PERCENT else "{:.4g}".format
    if len(row.row.cells) == 1:
        return shown(values[0])
    missing = "" if len(values) == len(row.row.cells) else f", {len(values)} of {len(row.row.cells)} seeds"
    return f"{shown(statistics.mean(values))} ({shown(min(values))} to {shown(max(values))}{missing})"


def _ratio(row: Filled, base: Filled, name: str) -> str:
    ours, theirs = row.median(name), base.median(name)
    return f"{ours / theirs:.2f}" if ours and theirs else "-"


def _shown(value: float | None, written: Callable[[float], str]) -> str:
    return "-" if value is None else written(value)


def _under(table: Table, done: Sequence[Saved]) -> list[str]:
    """Settings, command and machine, a line each."""
    method = "METHOD" if len(table.methods) != 1 else table.methods[0]
    line = shlex.join(["subquad", *cells.command(table.task, method, table.given), "--threads", str(cells.THREADS)])
    seeds = ", ".join(map(str, table.seeds))
    lines = [f"Settings: {_settings(table.settings)}; seed{'s' if len(table.seeds) > 1 else ''} {seeds}."]
    if table.projected:
        lines.append(f"Projected: the median of the measured steps, times {table.projected:,}.")
    lines.append(f"The command of a row: `{line}`; of the table: `python benchmarks/results.py --only {table.name}`.")
    where: dict[str, list[str]] = {}
    for record in done:
        at = on({**record["machine"], "threads": record["threads"]})
        jobs = f"{record['jobs']} trainings side by side" if record["jobs"] > 1 else "one training at a time"
        where.setdefault(f"{at}; {jobs}; commit {record['commit'] or 'unknown'}.", []).append(record["method"])
    for place, methods in where.items():
        which = "" if len(where) == 1 else f" ({', '.join(f'`{name}`' for name in dict.fromkeys(methods))})"
        lines.append(f"Measured on: {place}{which}")
    return [f"- {line}" for line in lines]


def _settings(settings: Settings) -> str:
    given = {name: value for name, value in asdict(settings).items() if name not in ("seed", "options") and value is not None}
    words = [f"{name.replace('_', ' ')} {value:,}" for name, value in given.items()]
    return ", ".join([*words, *(f"{name} {value}" for name, value in settings.options)])


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
