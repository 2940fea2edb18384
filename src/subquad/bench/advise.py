"""What to use for a workload, from measurements on this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from subquad.bench import analysis
from subquad.bench.compare import FILE, compare
from subquad.bench.plan import LONGEST, Plan, default_methods
from subquad.bench.results import BASELINE, Pass, Results, Setting, load
from subquad.errors import InputError
from subquad.families.base import Mechanism
from subquad.mechanisms import Local, Longformer, Pooled
from subquad.registry import resolve
from subquad.runs.results_file import ResultsError

_WINDOWED: dict[str, Callable[[int], Mechanism]] = {
    "local": lambda window: Local(window=window),
    "longformer": lambda window: Longformer(window=window),
    "pooled": lambda window: Pooled(window=window),
}

_REACH = 16  # how many times the longest length measured an advice may go


@dataclass(frozen=True)
class Advice:
    """One mechanism for the workload.

    Args:
        method: its options.
        code: the line of Python to use.
        reasons: why, with figures.
        times_sdpa: how many times faster than SDPA, at the length asked for.
        measured_to: the longest length that was measured; beyond it, figures are extrapolated.
        megabytes: what a forward pass adds to its inputs at its peak.
        error: relative error against exact softmax, on a model's inputs where the results have them, otherwise on random ones.
    """

    method: Mechanism
    code: str
    reasons: tuple[str, ...]
    times_sdpa: float | None
    measured_to: int
    megabytes: float | None
    error: float | None


def advise(
    length: int,
    *,
    is_causal: bool = False,
    cross: bool = False,
    decode: bool = False,
    training: bool = False,
    key_padding_mask: bool = False,
    enable_gqa: bool = False,
    exact_window: int | None = None,
    results: Results | str | os.PathLike[str] | None = None,
    budget: float = 60.0,
) -> list[Advice]:
    """The two or three best mechanisms for sequences of `length` tokens, best first.

    Args:
        is_causal, cross, decode, key_padding_mask, enable_gqa: what it must be able to do; `decode` ranks by time a token.
        training: rank by forward and backward together.
        exact_window: pairs of tokens at most this far apart must be weighed as softmax weighs them.
        results: of a comparison, or the folder it wrote; by default a quick one is run now.
        budget: seconds that this quick one may take.
    """
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= LONGEST:
        raise InputError(f"length is a whole number of tokens from 1 to {LONGEST:,}; got {length!r}.")
    needs = {"is_causal": is_causal, "cross": cross, "decode": decode, "key_padding_mask": key_padding_mask}
    asked = [need for need, is_asked in {**needs, "enable_gqa": enable_gqa}.items() if is_asked]
    able = {name: config for name, config in _options(length, exact_window).items() if not config.reasons(asked)}
    kind: Pass = "decode" if decode else "training" if training else "forward"
    measured = _results(results, length, kind, is_causal, able, budget)
    rated = [r for name in able if (r := _rate(measured, name, able[name], length, kind)) is not None]
    return [replace(advice, code=_code(advice.method, is_causal and not cross)) for advice in _choose(rated, length, kind)]


def _options(length: int, exact_window: int | None) -> dict[str, Mechanism]:
    """What could be used, by name."""
    if exact_window is not None:
        if isinstance(exact_window, bool) or not isinstance(exact_window, int) or exact_window < 1:
            raise InputError(f"exact_window is a whole number of tokens, at least 1; got {exact_window!r}.")
        windowed = {name: build(exact_window) for name, build in _WINDOWED.items() if exact_window < length - 1}
        return {"softmax": resolve("softmax"), **windowed}
    return {name: resolve(name).for_length(length) for name in ("softmax", *default_methods())}


def _results(
    given: Results | str | os.PathLike[str] | None,
    length: int,
    kind: Pass,
    is_causal: bool,
    able: dict[str, Mechanism],
    budget: float,
) -> Results:
    if isinstance(given, Results):
        found = given
    elif isinstance(given, (str, os.PathLike)):
        found = stored(given)
    elif given is not None:
        raise InputError(f"results are those of a comparison, or the folder it wrote; got {given!r}.")
    else:
        found = _quick(length, kind, is_causal, able, budget)
    if not any(t.kind == kind and t.rounds for t in found.timings):
        raise ResultsError(f"these results have no {kind} times. Compare again with that pass, or leave the results out.")
    if found.setting.is_causal != is_causal and kind != "decode":
        word = "causal" if found.setting.is_causal else "bidirectional"
        flag = "" if found.setting.is_causal else " --causal"
        raise ResultsError(f"these results are of {word} attention. Compare with: subquad compare{flag} --out another-folder")
    longest = max(t.length for t in found.timings if t.kind == kind and t.rounds)
    if length > _REACH * longest:
        raise ResultsError(
            f"these results reach {longest:,} tokens, and {length:,} is more than {_REACH} times that. "
            "Compare at longer lengths, or leave the results out."
        )
    return found


def stored(path: str | os.PathLike[str]) -> Results:
    """The results in the folder of a comparison, or in its file."""
    return load(Path(path) / FILE if Path(path).is_dir() else Path(path))


def _quick(length: int, kind: Pass, is_causal: bool, able: dict[str, Mechanism], budget: float) -> Results:
    import tempfile

    import torch

    lengths = sorted({max(1, length // 4), max(1, length // 2), length})
    methods = tuple(name for name in able if name in default_methods())
    plan = Plan(methods, tuple(lengths), (kind,), budget=budget, rounds=3)
    setting = Setting(is_causal=is_causal, threads=torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        return compare(plan, setting, Path(folder))


def _rate(results: Results, name: str, config: Mechanism, length: int, kind: Pass) -> Advice | None:
    """Figures at `length`, on a straight line of logarithms between the lengths measured."""
    measured = [t.length for t in results.of(kind) if t.rounds and t.method == (BASELINE if name == "softmax" else name)]
    if not measured:
        return None
    if name == "softmax":
        return Advice(config, "", (), 1.0, max(measured), _memory(results, BASELINE, length), 0.0)
    times = [(n, r.value) for n in results.lengths if (r := analysis.ratio(results, name, n, kind)) is not None]
    own = [f for f in results.facts if f.method == name]
    which = "real" if any("real" in f.errors for f in own) else "random"
    errors = [(f.length, f.errors[which]) for f in own if which in f.errors]
    reasons, slower = [], 1.0
    if config != (usual := resolve(name).for_length(length)):  # another window: its cost grows with it
        window, known = getattr(config, "window", 1), getattr(usual, "window", 1)
        slower = max(window / known, 1.0)
        reasons.append(f"estimated from window={known}, which was measured")
    if length > max(measured):
        reasons.append(f"extrapolated: it was measured up to {max(measured):,} tokens")
    if config.info.replaces_softmax:
        reasons.append("another function than softmax: a model must be trained with it")
    gain = _at(times, length)
    gain = None if gain is None else gain / slower
    memory, error = _memory(results, name, length), _at(errors, length)
    return Advice(config, "", tuple(reasons), gain, max(measured), memory, error)


def _memory(results: Results, name: str, length: int) -> float | None:
    return _at([(f.length, f.peak_bytes / 2**20) for f in results.facts if f.method == name and f.peak_bytes], length)


def _at(points: Sequence[tuple[int, float]], length: int) -> float | None:
    """The value at `length`: between the two nearest lengths, or beyond the last two by their growth."""
    points = sorted((n, v) for n, v in points if v > 0)
    if not points:
        return None
    if len(points) == 1 or length <= points[0][0]:
        return points[0][1]
    after = next((i for i, (n, _) in enumerate(points) if n >= length), len(points) - 1)
    (n, v), (m, w) = points[max(after - 1, 0)], points[max(after, 1)]
    return v * (length / n) ** (math.log(w / v) / math.log(m / n))


def _choose(rated: list[Advice], length: int, kind: Pass) -> list[Advice]:
    """The fastest; of those that gain something, the nearest to softmax, and the one that takes least memory."""
    faster = sorted((a for a in rated if (a.times_sdpa or 0) > 1), key=lambda a: -(a.times_sdpa or 0))
    softmax = next((a for a in rated if a.method.info.name == "softmax"), None)
    what = {"forward": "a forward pass", "training": "forward and backward", "decode": "a token"}[kind]
    chosen: dict[str, tuple[Advice, list[str]]] = {}

    def choose(advice: Advice, reason: str) -> None:
        chosen.setdefault(advice.method.info.name, (advice, []))[1].append(reason)

    if faster:
        best = faster[0]
        choose(best, f"the fastest at {length:,} tokens: {what} takes {best.times_sdpa:.1f}x less time than with SDPA")
        near = min((a for a in faster if a.error is not None), key=lambda a: a.error or 0.0, default=None)
        if near is not None:
            choose(near, f"of those faster than SDPA ({near.times_sdpa:.1f}x) the nearest to softmax: off by {near.error:.0%}")
        small = min((a for a in faster if a.megabytes is not None), key=lambda a: a.megabytes or 0.0, default=None)
        if small is not None:
            choose(small, f"of those faster than SDPA ({small.times_sdpa:.1f}x) the least memory: {small.megabytes:.0f} MiB")
    elif softmax is not None:
        choose(softmax, f"exact, and at {length:,} tokens nothing that can do this is faster here")
    return [replace(a, reasons=(*reasons, *a.reasons)) for a, reasons in list(chosen.values())[:3]]


def _code(config: Mechanism, is_causal: bool) -> str:
    if config.reasons(["functional"]):
        return f"sq.Attention(dim, heads, {_written(config)})"
    name = config.info.name
    key = "q" if config.shares_query_and_key else "k"
    written = f'"{name}"' if config == resolve(name) else _written(config)
    return f"sq.attention(q, {key}, v, {written}{', is_causal=True' if is_causal else ''})"


def _written(config: Mechanism) -> str:
    default: dict[str, Any] = vars(resolve(config.info.name))
    options = ", ".join(f"{name}={value!r}" for name, value in vars(config).items() if default[name] != value)
    return f"sq.{type(config).__name__}({options})"
