"""Measurements as rows for charts, and as text."""

from __future__ import annotations

import math
from typing import Any

from subquad.bench import analysis
from subquad.bench.results import BASELINE, PASSES, Pass, Results

Rows = list[dict[str, Any]]
PASS_NAMES: dict[Pass, str] = {"forward": "forward", "training": "training", "decode": "decode, one token"}
LEAST_ERROR = 1e-8  # shown on a logarithmic axis for exact results


def digits(value: float) -> str:
    """Three significant digits; all digits of an integer above 1000."""
    return f"{float(f'{value:.3g}'):,g}" if value < 1000 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    unit, whole = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if seconds >= pair[1]), ("µs", 1e-6))
    return f"{digits(seconds / whole)} {unit}"


def size(count: float) -> str:
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    unit, whole = next((pair for pair in units if count >= pair[1]), ("B", 1))
    return f"{digits(count / whole)} {unit}"


def against(ratio: analysis.Ratio | None) -> str:
    """A ratio with its confidence interval."""
    if ratio is None:
        return ""
    if ratio.low is None or ratio.high is None:
        return f"{digits(ratio.value)}x ({'predicted' if ratio.is_predicted else 'one round'})"
    return f"{digits(ratio.value)}x ({digits(ratio.low)} to {digits(ratio.high)})"


def shown_methods(results: Results) -> list[str]:
    """The baseline, the compared methods, and any other method with a cell."""
    cells = [*(t.method for t in results.timings), *(f.method for f in results.facts)]
    return list(dict.fromkeys([BASELINE, *results.methods, *cells]))


def measured_passes(results: Results) -> list[Pass]:
    return [kind for kind in PASSES if any(analysis.seconds(t) for t in results.of(kind))]


def time_rows(results: Results) -> Rows:
    rows = []
    for timing in results.timings:
        taken = analysis.seconds(timing)
        if not taken or not math.isfinite(taken):
            continue
        ratio = analysis.ratio(results, timing.method, timing.length, timing.kind)
        rows.append(
            {
                "method": timing.method,
                "length": timing.length,
                "tokens": f"{timing.length:,}",
                "kind": timing.kind,
                "value": 1000 * taken,
                "is_predicted": not timing.rounds,
                "amount": duration(taken),
                "against": "the reference" if timing.method == BASELINE else against(ratio),
                "status": f"measured, rounds: {len(timing.rounds)}" if timing.rounds else f"predicted: {timing.why}",
            }
        )
    return _joined(rows, ("method", "kind"))


def memory_rows(results: Results) -> Rows:
    rows = []
    for fact in results.facts:
        if not fact.peak_bytes:
            continue
        base = results.fact(BASELINE, fact.length)
        gain = base.peak_bytes / fact.peak_bytes if base is not None and base.peak_bytes else None
        is_predicted = fact.status == "predicted"
        rows.append(
            {
                "method": fact.method,
                "length": fact.length,
                "tokens": f"{fact.length:,}",
                "value": fact.peak_bytes / 2**20,
                "is_predicted": is_predicted,
                "amount": size(fact.peak_bytes),
                "against": "the reference" if fact.method == BASELINE else "" if gain is None else f"{digits(gain)}x less",
                "status": f"predicted: {fact.why}" if is_predicted else "measured",
            }
        )
    return _joined(rows, ("method",))


def _joined(rows: Rows, keys: tuple[str, ...]) -> Rows:
    """Sorted; `joins` marks the points of a dashed line: the predicted ones and the measured one before them."""
    rows = sorted(rows, key=lambda row: (*(row[key] for key in keys), row["length"]))
    for i, row in enumerate(rows):
        after = rows[i + 1] if i + 1 < len(rows) else None
        follows = after is not None and all(after[key] == row[key] for key in keys) and after["is_predicted"]
        row["joins"] = row["is_predicted"] or follows
    return rows


def error_kinds(results: Results) -> list[str]:
    return list(dict.fromkeys(kind for fact in results.facts if fact.method != BASELINE for kind in fact.errors))


def fidelity_rows(results: Results) -> Rows:
    """Error against speed at the longest length at which a method has both; the label has the length if others have longer."""
    rows: Rows = []
    for kind in error_kinds(results):
        for method in shown_methods(results):
            found = _longest(results, method, kind)
            if found is None:
                continue
            length, error, ratio = found
            rows.append(
                {
                    "method": method,
                    "kind": kind,
                    "length": length,
                    "tokens": f"{length:,}",
                    "error": max(error, LEAST_ERROR),
                    "gain": ratio.value,
                    "relative": f"{error:.3g}",
                    "against": against(ratio),
                    "label": method,
                }
            )
    usual = max((row["length"] for row in rows), default=0)
    for row in rows:
        if row["length"] != usual:
            row["label"] = f"{row['method']} ({row['length']:,})"
    return rows


def _longest(results: Results, method: str, kind: str) -> tuple[int, float, analysis.Ratio] | None:
    if method == BASELINE:
        return None
    for length in sorted(results.lengths, reverse=True):
        fact, ratio = results.fact(method, length), analysis.ratio(results, method, length, "forward")
        error = None if fact is None else fact.errors.get(kind)
        if error is not None and math.isfinite(error) and ratio is not None:
            return length, error, ratio
    return None
