"""The tables of a page: headings, and rows of cells that can be sorted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from subquad.bench import analysis
from subquad.bench.results import BASELINE, Pass, Results
from subquad.registry import resolve
from subquad.report import figures
from subquad.report.styles import record

# Headings as in the README, and the need (see subquad.families.base.NEEDS) that each shows.
_NEEDS = {"causal": "is_causal", "cross": "cross", "padding": "key_padding_mask", "GQA": "enable_gqa"}


@dataclass(frozen=True)
class Cell:
    """The text of a cell, its sort key (None sorts last), and its kind, which is its CSS class."""

    text: str
    key: float | str | None = None
    kind: str = ""

    @property
    def is_number(self) -> bool:
        return isinstance(self.key, float) and self.kind != "list"


@dataclass(frozen=True)
class Table:
    """A caption for screen readers, headings, and rows; the first cell of a row is its heading."""

    name: str
    caption: str
    headings: list[str]
    rows: list[list[Cell]] = field(default_factory=list)

    def has_numbers(self, column: int) -> bool:
        return any(row[column].is_number for row in self.rows)


_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_NONE = Cell("-", None, "none")


def crossovers(results: Results) -> Table:
    headings = ["method", "family", "forward, from", "training, from", "memory, from"]
    gains = {kind: _longest(results, kind) for kind in figures.measured_passes(results)}
    usual = {kind: Counter(n for n, _ in found.values()).most_common(1)[0][0] for kind, found in gains.items() if found}
    headings += [f"{kind} gain at {usual[kind]:,}" if kind in usual else f"{kind} gain" for kind in gains]
    table = Table("crossovers", "From which length on a method is faster than SDPA, and by how much.", headings)
    measured = [*(any(t.rounds for t in results.of(kind)) for kind in ("forward", "training")), True]
    for method in figures.shown_methods(results):
        facts = record(method)
        is_baseline = method == BASELINE
        starts = [analysis.time_crossover(results, method, kind) for kind in ("forward", "training")]
        starts.append(analysis.memory_crossover(results, method))
        table.rows.append(
            [
                _name(method),
                _word("reference" if is_baseline else facts.family.replace("_", "-") if facts is not None else ""),
                *(_NONE if is_baseline or not known else _start(start) for start, known in zip(starts, measured, strict=True)),
                *(_gain(found.get(method), usual.get(kind, 0)) for kind, found in gains.items()),
            ]
        )
    return table


def growth(results: Results) -> Table:
    headings = ["method", "measured time", "time in theory", "measured memory", "memory in theory", "paper"]
    table = Table("growth", "How time and memory grow with the length.", headings)
    for method in figures.shown_methods(results):
        paper = record("softmax" if method == BASELINE else method)
        table.rows.append(
            [
                _name(method),
                _growth(analysis.time_growth(results, method, "forward")),
                _word(paper.time if paper is not None else ""),
                _growth(analysis.memory_growth(results, method)),
                _word(paper.memory if paper is not None else ""),
                _word(paper.paper if paper is not None else ""),
            ]
        )
    return table


def capabilities(results: Results) -> Table:
    headings = ["method", "idea", *_NEEDS, "decode state", "as a function"]
    table = Table("capabilities", "What each method supports with its default options.", headings)
    for method in [*results.methods, *(m for m in results.refusals if m not in results.methods)]:
        facts = record(method)
        if facts is None:
            if method != BASELINE:
                table.rows.append([_name(method), *[_NONE] * (len(headings) - 1)])
            continue
        able = [_able(method, need) for need in _NEEDS.values()]
        state = facts.state if "decode" in facts.supports else "no"
        plain = "yes" if "functional" in facts.supports else "no: it has parameters"
        table.rows.append([_name(method), _word(facts.idea), *able, _word(state), _word(plain)])
    return table


def not_run(results: Results) -> Table:
    """Cells that were refused, failed or predicted; those whose reasons differ only in numbers share a row."""
    table = Table("not-run", "What was not measured, and why.", ["status", "quantity", "lengths", "methods", "why"])
    cells: list[tuple[str, int, str, str, str]] = [
        (t.method, t.length, f"{t.kind} time", t.status, t.why) for t in results.timings
    ]
    cells += [(f.method, f.length, "memory and error", f.status, f.why) for f in results.facts]
    reasons: dict[tuple[str, str, str, str], list[tuple[int, str]]] = {}
    for method, length, quantity, status, why in cells:
        if status != "measured":
            reasons.setdefault((status, quantity, method, _NUMBER.sub("#", why)), []).append((length, why))
    rows: dict[tuple[str, str, str, tuple[int, ...]], list[tuple[str, str]]] = {}
    for method, why in results.refusals.items():
        rows.setdefault(("refused", "everything", why, ()), []).append((method, why))
    for (status, quantity, method, pattern), found in reasons.items():
        lengths = tuple(sorted(length for length, _ in found))
        rows.setdefault((status, quantity, pattern, lengths), []).extend((method, why) for _, why in found)
    order = {"refused": 0, "failed": 1, "predicted": 2}
    for (status, quantity, _, lengths), pairs in sorted(rows.items(), key=lambda item: order[item[0][0]]):
        methods = ", ".join(dict.fromkeys(method for method, _ in pairs))
        is_all = not lengths or lengths == tuple(sorted(results.lengths))
        listed = Cell("all" if is_all else ", ".join(f"{n:,}" for n in lengths), float(min(lengths, default=0)), "list")
        why = _merged([why for _, why in pairs])
        table.rows.append([Cell(status, status, status), _word(quantity), listed, _word(methods), _word(why)])
    return table


def _merged(whys: Sequence[str]) -> str:
    """One sentence for several that differ only in numbers, with the range of each number."""
    numbers = [[float(n) for n in found] for found in zip(*(_NUMBER.findall(why) for why in whys), strict=True)]
    texts = iter(f"{min(n):,g}" if min(n) == max(n) else f"{min(n):,g} to {max(n):,g}" for n in numbers)
    return _NUMBER.sub(lambda match: next(texts), whys[0]) if len(set(whys)) > 1 else whys[0]


def all_figures(results: Results) -> list[tuple[str, Table]]:
    """The numbers behind the charts, one table per quantity."""
    found = []
    for kind in figures.measured_passes(results):
        cells = {}
        for timing in results.of(kind):
            taken = analysis.seconds(timing)
            text = timing.status if taken is None else figures.duration(taken)
            cells[timing.method, timing.length] = Cell(text, taken, timing.status)
        found.append((f"Time, {figures.PASS_NAMES[kind]}", _matrix(results, f"{kind}-figures", f"Time, {kind}.", cells)))
    cells = {
        (f.method, f.length): Cell(
            figures.size(f.peak_bytes) if f.peak_bytes else f.status, float(f.peak_bytes) if f.peak_bytes else None, f.status
        )
        for f in results.facts
    }
    found.append(("Peak memory", _matrix(results, "memory-figures", "Peak memory.", cells)))
    for given in figures.error_kinds(results):
        errors = {
            (f.method, f.length): Cell(f"{f.errors[given]:.3g}", f.errors[given], f.status)
            for f in results.facts
            if given in f.errors
        }
        found.append((f"Relative error, {given} inputs", _matrix(results, f"error-{len(found)}", f"Error, {given}.", errors)))
    return found


def _matrix(results: Results, name: str, caption: str, cells: dict[tuple[str, int], Cell]) -> Table:
    methods = [m for m in figures.shown_methods(results) if any(method == m for method, _ in cells)]
    rows = [[_name(m), *(cells.get((m, n), _NONE) for n in results.lengths)] for m in methods]
    return Table(name, caption, ["method", *(f"{n:,}" for n in results.lengths)], rows)


def machine(results: Results) -> list[tuple[str, str]]:
    """The machine and the settings of the comparison."""
    setting = results.setting
    facts = {
        **{name: str(value) for name, value in results.machine.items() if value is not None},
        "device": f"{setting.device}, {_count(setting.threads, 'thread')}",
        "shape": f"batch {setting.batch}, {_count(setting.heads, 'head')} of {setting.head_dim} channels",
        "dtype": setting.dtype,
        "direction": "causal" if setting.is_causal else "bidirectional",
        "lengths": ", ".join(f"{n:,}" for n in results.lengths),
        "errors measured on": f"random inputs{f', {results.inputs}' if results.inputs else ''}",
        "command": results.command,
        "time spent": f"{results.seconds:,.0f} s",
    }
    return list(facts.items())


def predictions(results: Results) -> str:
    """One sentence about predicted cells; empty if there are none."""
    cells: Iterable[str] = [*(t.status for t in results.timings), *(f.status for f in results.facts)]
    count = sum(status == "predicted" for status in cells)
    if not count:
        return ""
    were = "was" if count == 1 else "were"
    return (
        f"{_count(count, 'cell')} {were} not run, because the time budget or the memory was too small, "
        f"and {were} predicted from shorter "
        "lengths: hollow points and dashed lines in the charts. Predictions have no confidence interval."
    )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _name(method: str) -> Cell:
    return Cell(method, method)


def _word(text: str) -> Cell:
    return Cell(text, text) if text else _NONE


def _able(method: str, need: str) -> Cell:
    if not resolve(method).reasons([need]):
        return Cell("yes", "yes", "yes")
    return Cell("with options", "with options") if need not in resolve(method).info.refuses else Cell("no", "no", "no")


def _start(start: analysis.Crossing | None) -> Cell:
    if start is None:
        return Cell("not reached", None, "none")
    text = f"≤ {start.length:,.0f}" if start.at_most else analysis.rounded(start.length)
    return Cell(text if start.is_certain else f"{text}, uncertain", float(start.length))


def _longest(results: Results, kind: Pass) -> dict[str, tuple[int, analysis.Ratio]]:
    """By method, the ratio at the longest measured length; predicted for methods that were never measured."""
    found = {}
    for method in figures.shown_methods(results):
        ratios = [(n, analysis.ratio(results, method, n, kind)) for n in results.lengths if method != BASELINE]
        known = [(n, ratio) for n, ratio in ratios if ratio is not None]
        if known:
            found[method] = max(known, key=lambda pair: (not pair[1].is_predicted, pair[0]))
    return found


def _gain(found: tuple[int, analysis.Ratio] | None, usual: int) -> Cell:
    if found is None:
        return _NONE
    length, ratio = found
    where = "" if length == usual else f" at {length:,}"
    return Cell(figures.against(ratio) + where, ratio.value, "predicted" if ratio.is_predicted else "")


def _growth(exponent: float | None) -> Cell:
    return _NONE if exponent is None else Cell(f"N^{exponent:.2f}", exponent)
