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
from subquad.bench.plan import Plan, default_methods
from subquad.bench.results import BASELINE, LONGEST, Pass, Results, Setting, load
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

_EXTRAPOLATION = 16  # how many times the longest measured length one may ask for
_STEEPEST = 3.0  # exponent with which a figure may grow or shrink with the length; a steeper one is noise


@dataclass(frozen=True)
class Advice:
    """One mechanism for the workload.

    Args:
        method: the mechanism with its options.
        code: the line of Python to use.
        reasons: why, with figures.
        times_sdpa: how many times faster than SDPA, at the requested length.
        measured_to: the longest measured length; beyond it, figures are extrapolated.
        megabytes: peak memory of a forward pass beyond its inputs.
        error: relative error against exact softmax, on a model's inputs if the results have them, otherwise on random ones.
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
        is_causal, cross, decode, key_padding_mask, enable_gqa: what it must support; `decode` ranks by the time of one token.
        training: rank by the time of forward and backward together.
        exact_window: pairs of tokens at most this far apart must have the weights that softmax gives them.
        results: those of a comparison, or its folder; by default a quick comparison is run now.
        budget: seconds for the quick comparison.
    """
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= LONGEST:
        raise InputError(f"length must be an integer of tokens from 1 to {LONGEST:,}; got {length!r}.")
    needs = {"is_causal": is_causal, "cross": cross, "decode": decode, "key_padding_mask": key_padding_mask}
    required = [need for need, is_needed in {**needs, "enable_gqa": enable_gqa}.items() if is_needed]
    able = {name: method for name, method in _candidates(length, exact_window).items() if not method.reasons(required)}
    kind: Pass = "decode" if decode else "training" if training else "forward"
    measured = _measured(results, length, kind, is_causal, able, budget)
    rated = [r for name in able if (r := _rate(measured, name, able[name], length, kind)) is not None]
    return [replace(advice, code=_code(advice.method, is_causal and not cross)) for advice in _choose(rated, length, kind)]


def _candidates(length: int, exact_window: int | None) -> dict[str, Mechanism]:
    """The mechanisms to choose from, by name."""
    if exact_window is not None:
        if isinstance(exact_window, bool) or not isinstance(exact_window, int) or exact_window < 1:
            raise InputError(f"exact_window must be an integer of at least 1; got {exact_window!r}.")
        windowed = {name: build(exact_window) for name, build in _WINDOWED.items() if exact_window < length - 1}
        return {"softmax": resolve("softmax"), **windowed}
    return {name: resolve(name).for_length(length) for name in ("softmax", *default_methods())}


def _measured(
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
        found = load_stored(given)
    elif given is not None:
        raise InputError(f"results must be those of a comparison, or its folder; got {given!r}.")
    else:
        found = _quick(length, kind, is_causal, able, budget)
    if not any(t.kind == kind and t.rounds for t in found.timings):
        raise ResultsError(f"these results have no {kind} times. Run the comparison with that pass, or leave the results out.")
    if found.setting.is_causal != is_causal and kind != "decode":
        word = "causal" if found.setting.is_causal else "bidirectional"
        flag = "" if found.setting.is_causal else " --causal"
        raise ResultsError(f"these results are for {word} attention. Run: subquad compare{flag} --out another-folder")
    longest = max(t.length for t in found.timings if t.kind == kind and t.rounds)
    if length > _EXTRAPOLATION * longest:
        raise ResultsError(
            f"length may be at most {_EXTRAPOLATION} times the longest measured one, {longest:,}; got {length:,}. "
            "Run the comparison at longer lengths, or leave the results out."
        )
    return found


def load_stored(path: str | os.PathLike[str]) -> Results:
    """The results of a comparison, from its folder or file."""
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


def _rate(results: Results, name: str, mechanism: Mechanism, length: int, kind: Pass) -> Advice | None:
    """Figures at `length`, interpolated between measured lengths on logarithmic axes."""
    measured = [t.length for t in results.of(kind) if t.rounds and t.method == (BASELINE if name == "softmax" else name)]
    if not measured:
        return None
    if name == "softmax":
        return Advice(mechanism, "", (), 1.0, max(measured), _memory(results, BASELINE, length), 0.0)
    times = [(n, r.value) for n in results.lengths if (r := analysis.ratio(results, name, n, kind)) is not None]
    own = [f for f in results.facts if f.method == name]
    which = "real" if any("real" in f.errors for f in own) else "random"
    errors = [(f.length, f.errors[which]) for f in own if which in f.errors]
    reasons, slower = [], 1.0
    if mechanism != (usual := resolve(name).for_length(length)):  # with another window, whose cost grows with it
        window, known = getattr(mechanism, "window", 1), getattr(usual, "window", 1)
        slower = max(window / known, 1.0)
        reasons.append(f"estimated from a measurement with window={known}")
    if length > max(measured):
        reasons.append(f"extrapolated: measured up to {max(measured):,} tokens")
    if mechanism.info.replaces_softmax:
        reasons.append("not an approximation of softmax: a model must be trained with it")
    gain = _at(times, length)
    gain = None if gain is None else gain / slower
    memory, error = _memory(results, name, length), _at(errors, length)
    return Advice(mechanism, "", tuple(reasons), gain, max(measured), memory, error)


def _memory(results: Results, name: str, length: int) -> float | None:
    return _at([(f.length, f.peak_bytes / 2**20) for f in results.facts if f.method == name and f.peak_bytes], length)


def _at(points: Sequence[tuple[int, float]], length: int) -> float | None:
    """The value at `length`: interpolated between the two nearest lengths, or extrapolated from the last two."""
    points = sorted((n, v) for n, v in points if 0 < v < math.inf)
    if not points:
        return None
    if len(points) == 1 or length <= points[0][0]:
        return points[0][1]
    after = next((i for i, (n, _) in enumerate(points) if n >= length), len(points) - 1)
    (n, v), (m, w) = points[max(after - 1, 0)], points[max(after, 1)]
    exponent = math.log(w / v) / math.log(m / n)
    return v * (length / n) ** max(-_STEEPEST, min(exponent, _STEEPEST))


def _choose(rated: list[Advice], length: int, kind: Pass) -> list[Advice]:
    """The fastest; of those faster than SDPA, the closest to softmax and the one that needs least memory."""
    faster = sorted((a for a in rated if (a.times_sdpa or 0) > 1), key=lambda a: -(a.times_sdpa or 0))
    softmax = next((a for a in rated if a.method.info.name == "softmax"), None)
    what = {"forward": "a forward pass", "training": "forward and backward", "decode": "decoding a token"}[kind]
    chosen: dict[str, tuple[Advice, list[str]]] = {}

    def choose(advice: Advice, reason: str) -> None:
        chosen.setdefault(advice.method.info.name, (advice, []))[1].append(reason)

    if faster:
        best = faster[0]
        choose(best, f"the fastest at {length:,} tokens: {what} is {best.times_sdpa:.1f}x faster than with SDPA")
        near = min((a for a in faster if a.error is not None), key=lambda a: a.error or 0.0, default=None)
        if near is not None:
            choose(near, f"of those faster than SDPA ({near.times_sdpa:.1f}x), the closest to softmax: error {near.error:.0%}")
        small = min((a for a in faster if a.megabytes is not None), key=lambda a: a.megabytes or 0.0, default=None)
        if small is not None:
            choose(small, f"of those faster than SDPA ({small.times_sdpa:.1f}x), the least memory: {small.megabytes:.0f} MiB")
    elif softmax is not None:
        choose(softmax, f"exact, and at {length:,} tokens nothing that supports this is faster on this machine")
    return [replace(a, reasons=(*reasons, *a.reasons)) for a, reasons in list(chosen.values())[:3]]


def _code(mechanism: Mechanism, is_causal: bool) -> str:
    if mechanism.reasons(["functional"]):
        return f"sq.Attention(dim, heads, {_constructor(mechanism)})"
    name = mechanism.info.name
    key = "q" if mechanism.shares_query_and_key else "k"
    method = f'"{name}"' if mechanism == resolve(name) else _constructor(mechanism)
    return f"sq.attention(q, {key}, v, {method}{', is_causal=True' if is_causal else ''})"


def _constructor(mechanism: Mechanism) -> str:
    """The call that makes it, with the options that differ from the defaults."""
    default: dict[str, Any] = vars(resolve(mechanism.info.name))
    options = ", ".join(f"{name}={value!r}" for name, value in vars(mechanism).items() if default[name] != value)
    prefix = "sq." if type(mechanism).__module__.startswith("subquad.") else ""  # others are imported from their own package
    return f"{prefix}{type(mechanism).__name__}({options})"
