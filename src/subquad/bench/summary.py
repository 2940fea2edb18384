"""A comparison as a table for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from subquad.bench import analysis
from subquad.bench.results import BASELINE, Pass, Results

_NAMES: dict[Pass, str] = {"forward": "forward pass", "training": "forward and backward", "decode": "decoding one token"}
_OTHER_COLUMNS = 48  # characters of the other columns; each length takes 8


def table(results: Results, kind: Pass, width: int) -> Table:
    """The speedup of each method over SDPA, at as many lengths as fit into `width` characters."""
    title = f"Speedup over SDPA, {_NAMES[kind]} (~: predicted, ?: uncertain)"
    shown = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("method", style="bold", no_wrap=True)
    known = [n for n in results.lengths if any(t.length == n and analysis.seconds(t) for t in results.of(kind))]
    step = -(-len(known) // max(1, (width - _OTHER_COLUMNS) // 8))
    lengths = known[::-1][::step][::-1]
    for length in lengths:
        shown.add_column(f"{length:,}", justify="right", no_wrap=True)
    for heading in ("95% CI", "faster from", "error"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for method in results.methods:
        ratios = {n: analysis.ratio(results, method, n, kind) for n in lengths}
        if method == BASELINE or not any(ratios.values()):
            continue
        last = ratios[lengths[-1]]
        shown.add_row(
            method,
            *(_ratio(ratios[n]) for n in lengths),
            "-" if last is None or last.low is None else f"{last.low:.1f}-{last.high:.1f}",
            _crossing(analysis.time_crossover(results, method, kind)),
            _error(results, method),
        )
    return shown


def _ratio(ratio: analysis.Ratio | None) -> str:
    if ratio is None:
        return "-"
    text = f"{'~' if ratio.is_predicted else ''}{ratio.value:.2f}"
    return f"[green]{text}[/green]" if analysis.is_surely_faster(ratio) else text


def _crossing(crossing: analysis.Crossing | None) -> str:
    if crossing is None:
        return "-"
    text = f"<= {crossing.length:,.0f}" if crossing.at_most else analysis.rounded(crossing.length)
    return text if crossing.is_certain else f"{text}?"


def _error(results: Results, method: str) -> str:
    which = "real" if results.inputs else "random"
    facts = sorted((f.length, f.errors[which]) for f in results.facts if f.method == method and which in f.errors)
    return f"{facts[-1][1]:.0%}" if facts else "-"
