"""Analysis of measurements: ratios with confidence intervals, growth, and the length from which a method is faster."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from subquad.bench.results import BASELINE, PASSES, Pass, Results, Timing

# The 97.5th percentile of Student's t, for 1 to 30 degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Ratio:
    """How many times faster than the baseline, with a 95% confidence interval (None for a single round or a prediction)."""

    value: float
    low: float | None = None
    high: float | None = None
    is_predicted: bool = False


@dataclass(frozen=True)
class Crossing:
    """The length from which a method beats the baseline; `at_most` if it already does at the shortest one.

    It is not `is_certain` if the confidence interval at the longest measured length includes 1.
    """

    length: float
    at_most: bool = False
    is_certain: bool = True


def seconds(timing: Timing | None) -> float | None:
    """The median over rounds, or the prediction."""
    if timing is None:
        return None
    return statistics.median(s for s, _ in timing.rounds) if timing.rounds else timing.predicted


def ratio(results: Results, method: str, length: int, kind: Pass) -> Ratio | None:
    """The geometric mean over rounds, with Student's confidence interval of the logarithms."""
    timing = results.timing(method, length, kind)
    if timing is None:
        return None
    logs = [math.log(base / own) for own, base in timing.rounds if base is not None]
    if logs:
        return _interval(logs)
    own, base = seconds(timing), seconds(results.timing(BASELINE, length, kind))
    return None if own is None or base is None else Ratio(base / own, is_predicted=True)


def _interval(logs: Sequence[float]) -> Ratio:
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean))
    half = _T[min(len(logs) - 1, len(_T)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def growth(points: Sequence[tuple[int, float]], last: int = 4) -> float | None:
    """The exponent e of value ~ length^e, by least squares over the longest few lengths."""
    points = sorted(points)[-last:]
    if len(points) < 2:
        return None
    logs = [(math.log(n), math.log(max(v, 1e-12))) for n, v in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def time_growth(results: Results, method: str, kind: Pass) -> float | None:
    timings = [t for t in results.of(kind) if t.method == method and t.rounds]
    return growth([(t.length, seconds(t) or 0.0) for t in timings])


def memory_growth(results: Results, method: str) -> float | None:
    return growth([(f.length, float(f.peak_bytes)) for f in results.facts if f.method == method and f.peak_bytes])


def crossover(gains: Sequence[tuple[int, float]]) -> Crossing | None:
    """Where the gain over the baseline stays above 1, interpolated between lengths on logarithmic axes."""
    gains = sorted(gains)
    if not gains or gains[-1][1] <= 1:
        return None
    losing = [i for i, (_, gain) in enumerate(gains) if gain <= 1]
    if not losing:
        return Crossing(gains[0][0], at_most=True)
    (n, low), (m, high) = gains[losing[-1]], gains[losing[-1] + 1]
    share = -math.log(low) / (math.log(high) - math.log(low))
    return Crossing(n * (m / n) ** share)


def time_crossover(results: Results, method: str, kind: Pass) -> Crossing | None:
    """From measurements only, not from predictions."""
    found = [(n, ratio(results, method, n, kind)) for n in results.lengths]
    measured = [(n, r) for n, r in found if r is not None and not r.is_predicted]
    crossing = crossover([(n, r.value) for n, r in measured])
    return None if crossing is None else replace(crossing, is_certain=is_surely_faster(measured[-1][1]))


def is_surely_faster(found: Ratio) -> bool:
    """Whether the lower end of the interval, or the value if there is none, is above 1."""
    return (found.value if found.low is None else found.low) > 1


def memory_crossover(results: Results, method: str) -> Crossing | None:
    gains = []
    for length in results.lengths:
        own, base = results.fact(method, length), results.fact(BASELINE, length)
        if own is not None and base is not None and own.peak_bytes and base.peak_bytes:
            gains.append((length, base.peak_bytes / own.peak_bytes))
    return crossover(gains)


def headline(results: Results, kind: Pass = "forward") -> str:
    """One sentence about the fastest method at the longest length at which it was compared."""
    assert kind in PASSES
    if not any(t.rounds for t in results.of(kind) if t.method != BASELINE):
        none_can = results.refusals and not results.methods
        return "None of these methods can be compared." if none_can else "Nothing has been measured yet."
    for length in sorted(results.lengths, reverse=True):
        ratios = {m: ratio(results, m, length, kind) for m in results.methods if m != BASELINE}
        measured = {m: r for m, r in ratios.items() if r is not None and not r.is_predicted and is_surely_faster(r)}
        if not measured:
            continue
        best = max(measured, key=lambda m: measured[m].value)
        crossing = time_crossover(results, best, kind)
        start = (
            "At every measured length" if crossing is None or crossing.at_most else f"From {rounded(crossing.length)} tokens on"
        )
        gain = f"at {length:,} tokens it is {measured[best].value:.1f}x faster"
        fact = results.fact(best, length)
        error = None if fact is None else fact.errors.get("random")
        off = "" if error is None else f", and its output differs by {error:.0%} on random inputs"
        return f"{start}, {best} is faster than SDPA on this machine; {gain}{off}."
    return "At these lengths no method is faster than SDPA on this machine."


def rounded(length: float) -> str:
    """Rounded to two digits, with thousands separators."""
    digits = max(0, math.floor(math.log10(length)) - 1)
    return f"{round(length / 10**digits) * 10**digits:,}"
