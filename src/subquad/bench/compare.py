"""The comparison: every method at every length, in rounds, within a time budget. It can be stopped at any moment and resumed.

A first sweep goes from short to long lengths and measures each cell in a few rounds. A cell that would take too long, or more
memory than is free, is predicted from shorter lengths instead. Then more rounds follow. In a round all methods take turns at
one length, and each is compared with the baseline in the same round. Every measurement is saved at once.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from subquad.bench import analysis
from subquad.bench.measure import saved_inputs
from subquad.bench.plan import Plan, check_plan, example, refusals_of
from subquad.bench.results import BASELINE, Facts, Pass, Results, Setting, Timing, load, save
from subquad.bench.worker import MeasuringWorker, WorkerError
from subquad.registry import resolve
from subquad.runs.files import remove_unfinished
from subquad.runs.lock import exclusive
from subquad.runs.machine import describe_machine
from subquad.runs.memory import free_memory
from subquad.runs.progress import OnProgress, Progress
from subquad.runs.results_file import ResultsError, command_line, differences

FILE = "results.json"
_SLOWEST = 10  # a call with its preparation may take the budget divided by this
_VISIT_ROUNDS = 2  # rounds at one length before the next
_FIRST_ROUNDS = 3  # rounds of the first visit; fewer if no more fit
_FIRST_SWEEP: dict[Pass, float] = {"forward": 0.7, "training": 0.9, "decode": 0.95}  # fractions of the budget it may use
_MEMORY_SHARE = 0.8  # fraction of the free memory that a cell may take


def compare(
    plan: Plan,
    setting: Setting,
    out: Path,
    *,
    fresh: bool = False,
    on_progress: OnProgress = lambda progress: None,
) -> Results:
    """Run `plan`, and return what was measured.

    Args:
        out: the folder of the results; a comparison in it is resumed.
        fresh: start over instead.
        on_progress: called before each measurement.

    KeyboardInterrupt passes through; the file has all measurements made until then.
    """
    check_plan(plan, setting)
    path = out / FILE
    with exclusive(out, "comparison"):
        remove_unfinished(path)
        results = _begin(plan, setting, path, fresh)
        save(results, path)
        with MeasuringWorker(setting, plan.qkv) as worker:
            run = _Run(plan, results, worker, path, on_progress)
            run.check_agreement()
            run.first_sweep()
            run.more_rounds()
        results.finished = True
        save(results, path)
    return results


def _begin(plan: Plan, setting: Setting, path: Path, fresh: bool) -> Results:
    refusals = refusals_of(plan, setting)
    methods = [m for m in plan.methods if m not in refusals]
    machine = describe_machine(setting.device)
    results = Results(setting, machine)
    if path.exists() and not fresh:
        results = load(path)
        current = {**vars(setting), **machine, "commit": None}
        saved = {**vars(results.setting), **results.machine, "commit": None}
        if differ := differences({name: saved.get(name) for name in current}, current):
            raise ResultsError(
                f"the results in {path} are from another setting or machine ({'; '.join(differ)}). "
                "Choose another --out, or start over with --fresh."
            )
    inputs = _fingerprint(plan.qkv) if plan.qkv is not None else results.inputs
    if results.inputs and results.inputs != inputs:
        raise ResultsError(
            f"the errors in {path} were measured on the inputs {results.inputs}; got {inputs}. "
            "Choose another --out, or start over with --fresh."
        )
    results.inputs = inputs
    results.methods = list(dict.fromkeys([*results.methods, *methods]))
    results.lengths = sorted({*results.lengths, *plan.lengths})
    results.refusals |= refusals
    results.command = command_line()
    results.finished = False
    return results


def _fingerprint(path: Path) -> str:
    return f"{path.name} ({hashlib.sha256(path.read_bytes()).hexdigest()[:12]})"


class _Run:
    """One session of a comparison."""

    def __init__(self, plan: Plan, results: Results, worker: MeasuringWorker, path: Path, on_progress: OnProgress) -> None:
        self.plan, self.results, self.worker, self.path, self.on_progress = plan, results, worker, path, on_progress
        self.methods = [m for m in plan.methods if m in results.methods and m != BASELINE]
        self.saved_tokens = 0 if plan.qkv is None else saved_inputs(plan.qkv)[0].shape[2]
        self.begun, self.seconds_before = time.monotonic(), results.seconds
        self.shuffle = random.Random(0).shuffle
        self.costs: dict[tuple[int, Pass], float] = {}  # seconds of the last visit
        self.firsts: dict[tuple[str, int, Pass], float] = {}  # seconds of a cell's first timing, with its preparation

    @property
    def left(self) -> float:
        return self.plan.budget - (time.monotonic() - self.begun)

    def check_agreement(self) -> None:
        """Refuse methods that do not agree with their reference."""
        for method in list(self.methods):
            self._report(f"checking {method}")
            answer = self._ask(60.0, do="agree", method=method)
            if "failed" in answer:
                self.results.refusals[method] = answer["failed"]
                self.methods.remove(method)
                self._save()

    def first_sweep(self) -> None:
        """Forward passes at all lengths before anything else."""
        for kind in self.plan.passes:
            for length in sorted(self.plan.lengths):
                if kind == self.plan.passes[0]:
                    for method in (BASELINE, *self.methods):
                        self._facts(method, length)
                members = [m for m in (BASELINE, *self.methods) if self._is_due(m, length, kind)]
                rounds = [r for r in range(1, _FIRST_ROUNDS + 1) if self._fits(length, kind, r)]
                self._visit(length, kind, members, min(max(rounds, default=1), self.plan.rounds))

    def more_rounds(self) -> None:
        """Sweep after sweep, in random order, until each cell has its rounds or nothing more fits into the budget."""
        groups = [(n, kind) for n in self.plan.lengths for kind in self.plan.passes]
        while due := [g for g in groups if self._missing(*g) and self._cost(*g) < self.left]:
            lengths = sorted({length for length, _ in due})
            self.shuffle(lengths)
            for length, kind in sorted(due, key=lambda g: lengths.index(g[0])):  # a length's inputs and states are made once
                if self._cost(length, kind) < self.left:
                    members = [t.method for t in self._members(length, kind)]
                    self._visit(length, kind, members, min(_VISIT_ROUNDS, self._missing(length, kind)))

    def _members(self, length: int, kind: Pass) -> list[Timing]:
        timings = [self.results.timing(m, length, kind) for m in (BASELINE, *self.methods)]
        return [t for t in timings if t is not None and t.rounds and t.status == "measured"]

    def _missing(self, length: int, kind: Pass) -> int:
        """The most rounds that a method still lacks."""
        return max((self.plan.rounds - len(t.rounds) for t in self._members(length, kind)), default=0)

    def _cost(self, length: int, kind: Pass) -> float:
        """Seconds of a visit: those of the last one, or at least a warm-up and its rounds."""
        rounds = sum(analysis.seconds(t) or 0.0 for t in self._members(length, kind))
        return max(self.costs.get((length, kind), 0.0), (1 + _VISIT_ROUNDS) * rounds)

    def _fits(self, length: int, kind: Pass, rounds: int) -> bool:
        """Whether a first visit fits into the budget, as predicted from shorter lengths."""
        known = [self._expected(m, length, kind) for m in (BASELINE, *self.methods)]
        longest = self.plan.budget / _SLOWEST
        cost = sum(first + (rounds - 1) * call for call, first in known if call is not None and first <= longest)
        return cost < self.left - self.plan.budget * (1 - _FIRST_SWEEP[kind])

    def _visit(self, length: int, kind: Pass, members: list[str], rounds: int) -> None:
        start = time.monotonic()
        for _ in range(rounds):
            self._round(length, kind, members)
        self.costs[length, kind] = time.monotonic() - start

    def _round(self, length: int, kind: Pass, members: list[str]) -> None:
        """Time each of `members` once, the baseline first."""
        base = self._time(BASELINE, length, kind, None) if BASELINE in members else None
        others = [m for m in members if m != BASELINE]
        self.shuffle(others)
        for method in others:
            self._time(method, length, kind, base)

    def _time(self, method: str, length: int, kind: Pass, base: float | None) -> float | None:
        self._report(f"{method}, {length:,} tokens, {kind}")
        timing = self._timing(method, length, kind)
        expected = analysis.seconds(timing) or self._predicted(method, length, kind) or 1.0
        start = time.monotonic()
        answer = self._ask(60.0 + 20 * expected, do="time", method=method, length=length, kind=kind)
        self.firsts.setdefault((method, length, kind), time.monotonic() - start)
        if "failed" in answer:
            timing.status, timing.why = "failed", answer["failed"]
        else:
            timing.status, timing.why, timing.predicted = "measured", "", None
            timing.rounds.append((answer["seconds"], base if method != BASELINE else answer["seconds"]))
        self._save()
        return answer.get("seconds")

    def _timing(self, method: str, length: int, kind: Pass) -> Timing:
        timing = self.results.timing(method, length, kind)
        if timing is None:
            timing = Timing(method, length, kind)
            self.results.timings.append(timing)
        return timing

    def _is_due(self, method: str, length: int, kind: Pass) -> bool:
        """Whether to run a cell for the first time; if it must not run, the reason is recorded."""
        known = self.results.timing(method, length, kind)
        if known is not None and (known.rounds or known.status in ("failed", "refused")):
            return False
        if kind == "decode" and method != BASELINE and (reasons := example(method).reasons(["decode"])):
            refused = self._timing(method, length, kind)
            refused.status, refused.why = "refused", "; ".join(reasons.values())
            return False
        fact = self.results.fact(method, length)
        (expected, first), longest = self._expected(method, length, kind), self.plan.budget / _SLOWEST
        why = ""
        if first > longest:
            why = f"a call with its preparation would take about {first:.0f} s, and the budget allows {longest:.1f} s"
        elif fact is not None and fact.status == "predicted" and "memory" in fact.why:
            why = fact.why
        if not why and not self._fits(length, kind, 1):
            why = "the budget was used up"
        if not why or expected is None:
            return True
        timing = self._timing(method, length, kind)
        timing.status, timing.predicted, timing.why = "predicted", expected, why
        self._save()
        return False

    def _facts(self, method: str, length: int) -> None:
        """Measure memory and errors, once."""
        known = self.results.fact(method, length)
        lacks = method != BASELINE and length <= self.saved_tokens and known is not None and "real" not in known.errors
        if known is not None and known.status != "predicted" and not lacks:
            return
        fact = known or Facts(method, length)
        if known is None:
            self.results.facts.append(fact)
        fact.peak_bytes, why = self._predicted_bytes(method, length), ""
        if fact.peak_bytes is not None and fact.peak_bytes > _MEMORY_SHARE * free_memory():
            why = f"it would take about {fact.peak_bytes / 2**30:.1f} GiB of memory"
        expected, base = self._predicted(method, length, "forward"), self._predicted(BASELINE, length, "forward")
        if not why and max(expected or 0.0, base or 0.0) > self.plan.budget / _SLOWEST:
            why = "a call would take too long for the budget"
        if why and fact.peak_bytes is not None:
            fact.status, fact.why = "predicted", why
            self._save()
            return
        self._report(f"{method}, {length:,} tokens, memory and error")
        answer = self._ask(60.0 + 20 * (expected or 1.0), do="facts", method=method, length=length)
        if "failed" in answer:
            fact.status, fact.why, fact.peak_bytes = "failed", answer["failed"], None
        else:
            fact.status, fact.why, fact.peak_bytes, fact.errors = "measured", "", answer["bytes"], answer["errors"]
        self._save()

    def _predicted(self, method: str, length: int, kind: Pass) -> float | None:
        """Seconds, extrapolated from shorter lengths; for training, three forward passes if nothing else is known."""
        timings = [t for t in self.results.of(kind) if t.method == method and t.rounds and t.length < length]
        points = [(t.length, analysis.seconds(t) or 0.0) for t in timings]
        if points:
            return _extrapolated(points, length, _least_growth(method, kind))
        own = self.results.timing(method, length, "forward")
        forward = analysis.seconds(own) if own is not None else None
        return 3 * forward if kind == "training" and forward is not None else None

    def _expected(self, method: str, length: int, kind: Pass) -> tuple[float | None, float]:
        """Seconds of a call, and of the first one, which includes a warm-up or the state to decode from."""
        call = self._predicted(method, length, kind)
        before = [(n, taken) for (m, n, k), taken in self.firsts.items() if (m, k) == (method, kind) and n < length]
        first = _extrapolated(before, length, _least_growth(method, kind)) if before else 0.0
        return call, max(first, 2 * (call or 0.0))

    def _predicted_bytes(self, method: str, length: int) -> int | None:
        facts = [f for f in self.results.facts if f.method == method and f.status == "measured" and f.length < length]
        points = [(f.length, float(f.peak_bytes)) for f in facts if f.peak_bytes]
        return min(round(_extrapolated(points, length, 1.0)), 2**62) if points else None

    def _ask(self, timeout: float, **order: Any) -> dict[str, Any]:
        try:
            return self.worker.ask(timeout, **order)
        except WorkerError as error:
            return {"failed": str(error)}

    def _save(self) -> None:
        self.results.seconds = self.seconds_before + time.monotonic() - self.begun
        save(self.results, self.path)

    def _report(self, message: str) -> None:
        cells = len(self.plan.lengths) * len(self.plan.passes) * (1 + len(self.methods)) * self.plan.rounds
        done = sum(
            min(len(t.rounds), self.plan.rounds) if t.status == "measured" else self.plan.rounds for t in self.results.timings
        )
        left = max(self.left, 0.0)
        fraction = min(max(done / cells, 1 - left / self.plan.budget), 1.0)
        self.on_progress(Progress(message, fraction, left))


def _least_growth(method: str, kind: Pass) -> float:
    """The least exponent with which time grows with the length: at short lengths overheads hide it."""
    if kind == "decode":
        return 0.0
    if method == BASELINE:
        return 2.0
    return 3.0 if resolve(method).info.is_oracle else 1.0


def _extrapolated(points: Iterable[tuple[int, float]], length: int, least: float) -> float:
    """The value at `length`, by the growth between the last two points, but at least with exponent `least`."""
    points = sorted(points)
    n, value = points[-1]
    return value * (length / n) ** min(max(analysis.growth(points, last=2) or 0.0, least), 3.0)
