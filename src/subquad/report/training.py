"""The page and the table of a training run: the score and cost of each method, and its curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from subquad.report import figures
from subquad.report.charts import Chart, curves
from subquad.report.page import legend, library, write_html
from subquad.report.styles import method_styles, theme
from subquad.report.tables import Cell, Table
from subquad.training.results import Record, Results

_NONE = Cell("-", None, "none")
_MAX_MARKERS = 20  # on a line


def summary(results: Results) -> Table:
    """One row per method, the best first."""
    metric = results.metric
    headings = ["method", metric, "loss", "step time", "peak memory", "parameters", "steps", "time"]
    table = Table("summary", "The score of each method on the test rows, and its cost.", headings)
    for record in results.ranked():
        score, loss = (record.test.get(name) for name in (metric, "loss"))
        table.rows.append(
            [
                Cell(record.method, record.method),
                Cell(record.status, None, record.status) if score is None else Cell(f"{score:.4g}", score),
                _NONE if loss is None else Cell(f"{loss:.4g}", loss),
                _NONE if record.step_seconds is None else Cell(figures.duration(record.step_seconds), record.step_seconds),
                _NONE if not record.peak_bytes else Cell(figures.size(record.peak_bytes), float(record.peak_bytes)),
                _NONE if record.parameters is None else Cell(f"{record.parameters:,}", float(record.parameters)),
                _steps(record),
                _NONE if not record.seconds else Cell(f"{record.seconds:,.0f} s", record.seconds),
            ]
        )
    return table


def _steps(record: Record) -> Cell:
    if record.steps is None:
        return _NONE
    text = f"{record.step:,}" if record.step == record.steps else f"{record.step:,} of {record.steps:,}"
    return Cell(text, float(record.step))


def reasons(results: Results) -> Table:
    """Methods without a score, and why."""
    table = Table("reasons", "Methods without a score, and why.", ["method", "status", "why"])
    for record in results.records:
        if record.status != "done":
            why = record.why or "not finished"
            table.rows.append(
                [Cell(record.method, record.method), Cell(record.status, record.status, record.status), Cell(why, why)]
            )
    return table


def training_charts(results: Results, *, in_page: bool = True) -> list[Chart]:
    """The training loss, and each figure on the validation rows, by step."""
    rows: figures.Rows = []
    for record in results.records:
        rows += _curve(record, "training loss", record.losses)
        for name in dict.fromkeys(name for found in record.evals for name in found if name != "step"):
            points = [(int(found["step"]), found[name]) for found in record.evals if name in found]
            rows += _curve(record, f"validation {name}", points)
    drawn = method_styles(_drawn_methods(results))[1:]
    kinds = tuple(dict.fromkeys(row["kind"] for row in rows))
    return [Chart("curves", curves(rows, drawn, kinds, in_page), kinds)] if rows else []


def _curve(record: Record, kind: str, points: Sequence[tuple[int, float]]) -> figures.Rows:
    """The points of a line; only some have a marker, so that the line stays visible."""
    every = math.ceil(len(points) / _MAX_MARKERS)
    return [
        {
            "method": record.method,
            "kind": kind,
            "step": step,
            "value": value,
            "amount": f"{value:.4g}",
            "is_marked": i % every == 0,
        }
        for i, (step, value) in enumerate(points)
    ]


def _drawn_methods(results: Results) -> list[str]:
    return [record.method for record in results.records if record.losses]


def write_training_page(results: Results, path: Path) -> None:
    """Write `results` to `path` atomically, as one HTML file that works offline."""
    drawn = method_styles(_drawn_methods(results))[1:]
    found = training_charts(results)
    threads = ", ".join(map(str, dict.fromkeys(record.threads for record in results.records if record.steps)))
    known = {**results.settings, "task": results.task["name"], "threads": threads, **results.machine}
    facts = {name.replace("_", " "): value for name, value in known.items() if value not in (None, {}, "")}
    content = {
        "results": results,
        "summary": summary(results),
        "reasons": reasons(results),
        "charts": {chart.name: chart for chart in found},
        "specs": {chart.name: chart.spec for chart in found},
        "themes": {"light": theme(drawn, "light"), "dark": theme(drawn, "dark")},
        "legend": legend(drawn),
        "facts": [*((name, str(value)) for name, value in facts.items()), ("command", results.command)],
        "library": library(),
    }
    write_html(path, "training.html.jinja", content)
