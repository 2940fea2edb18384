"""A comparison as a table for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from subquad.bench import analysis
from subquad.bench.results import BASELINE, Pass, Results


def table(results: Results, kind: Pass) -> Table:
    """How many times faster than SDPA each method is, by length, with growth and crossover."""
    names = {"forward": "a forward pass", "training": "forward and backward", "decode": "one token more"}
    title = f"Times faster than SDPA, {names[kind]}; ~ predicted, in brackets the 95% interval at the longest length"
    shown = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    shown.add_column("method", style="bold", no_wrap=True)
    lengths = [n for n in results.lengths if any(t.length == n and t.rounds for t in results.of(kind))]
    for length in lengths:
        shown.add_column(f"{length:,}", justify="right")
    for heading in ("interval", "pays from", "time ~ N^", "memory ~ N^", "error"):
        shown.add_column(heading, justify="right")
    for method in results.methods:
        ratios = {n: analysis.ratio(results, method, n, kind) for n in lengths}
        if method == BASELINE or not any(ratios.values()):
            continue
        last = next((r for n in reversed(lengths) if (r := ratios[n]) is not None and r.low is not None), None)
        shown.add_row(
            method,
            *(_ratio(ratios[n]) for n in lengths),
            "-" if last is None else f"{last.low:.2f} - {last.high:.2f}",
            _crossing(analysis.time_crossover(results, method, kind)),
            _number(analysis.time_growth(results, method, kind)),
            _number(analysis.memory_growth(results, method)),
            _error(results, method),
        )
    return shown


def _ratio(ratio: analysis.Ratio | None) -> str:
    if ratio is None:
        return "-"
    text = f"{'~' if ratio.is_predicted else ''}{ratio.value:.2f}"
    return f"[green]{text}[/green]" if ratio.value > 1 else text


def _crossing(crossing: analysis.Crossing | None) -> str:
    if crossing is None:
        return "-"
    return f"<= {crossing.length:,.0f}" if crossing.at_most else analysis.rounded(crossing.length)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _error(results: Results, method: str) -> str:
    facts = [f for f in results.facts if f.method == method and "random" in f.errors]
    return f"{facts[-1].errors['random']:.0%}" if facts else "-"
