"""A comparison that nobody ran, with everything a page has to show: predicted, refused and failed cells, three passes."""

import math
import random

import subquad as sq
from subquad.bench.results import BASELINE, Facts, Results, Setting, Timing
from subquad.report.styles import family_of

LENGTHS = [2**i for i in range(8, 17)]
METHODS = [name for name in sq.methods() if name not in ("softmax", "svd")]
LONGEST_RUN = 16384  # of the baseline; beyond, it is predicted
FAILING, NO_DECODE, REFUSED = "clustered", ("clustered", "linformer", "nystrom", "induced"), "svd"
FAMILIES = {"kernelized": (9e-6, 0.3), "sparse": (3e-5, 0.7), "bucketed": (9e-5, 0.5), "low_rank": (1.5e-5, 0.9)}


def made_up(methods=METHODS, lengths=LENGTHS, *, rounds=5, seed=0):
    """Results of `methods` at `lengths`, the same for the same seed."""
    draw = random.Random(seed)
    machine = {
        "processor": "Made-up 9000",
        "accelerator": None,
        "cores": 2,
        "system": "Linux",
        "torch": "2.13",
        "commit": "abc1234",
    }
    found = Results(
        Setting(threads=2), machine, "subquad compare --budget 180", list(methods), list(lengths), seconds=171.0, finished=True
    )
    found.refusals = {REFUSED: "a plain function call: it is an oracle, with nothing to regularize"}
    places = {name: 1 + 0.17 * i for i, name in enumerate(methods)}
    for n in lengths:
        for method in (BASELINE, *methods):
            exponent, (step, error) = 1.0, FAMILIES.get(family_of(method), (2e-5, 0.4))
            if method in ("sparse_strided", "sparse_fixed", "pooled"):
                exponent = 1.5
            cost = 2.8e-8 * n**2 if method == BASELINE else places[method] * step * n * (n / 1024) ** (exponent - 1) + 2e-4
            for kind, factor in (("forward", 1.0), ("training", 3.1), ("decode", None)):
                taken = cost * factor if factor else 1e-7 * n + 5e-5 if method == BASELINE else 8e-5 * places[method]
                found.timings.append(_timing(draw, method, n, kind, taken, rounds))
            is_long = n > LONGEST_RUN
            peak = round((2048 + 300 * places.get(method, 1)) * n + (0 if method == BASELINE else 2**20))
            errors = {} if method == BASELINE or is_long else {
                "random": error * (1 + 0.05 * math.log2(n)) * draw.uniform(0.3, 2), "peaked": error * draw.uniform(0.01, 1)
            }  # fmt: skip
            why = "a call would take too long for the budget" if is_long else ""
            found.facts.append(Facts(method, n, "predicted" if is_long else "measured", peak, errors, why))
    return found


def _timing(draw, method, n, kind, taken, rounds):
    if kind == "decode" and method in NO_DECODE:
        return Timing(method, n, kind, "refused", why="a new token changes all of them")
    if method == FAILING and n >= 32768:
        return Timing(method, n, kind, "failed", why='RuntimeError: it broke <in> the "middle" & stopped')
    if n > LONGEST_RUN and (method == BASELINE or kind == "training"):
        return Timing(
            method,
            n,
            kind,
            "predicted",
            predicted=taken,
            why=f"a call would take about {taken:.0f} s, and the budget allows 12",
        )
    base = {"forward": 2.8e-8 * n**2, "training": 3.1 * 2.8e-8 * n**2, "decode": 1e-7 * n + 5e-5}[kind]
    pairs = []
    for _ in range(rounds):
        own, noise = taken * draw.lognormvariate(0, 0.05), base * draw.lognormvariate(0, 0.05)
        pairs.append((own, own if method == BASELINE else None if n > LONGEST_RUN else noise))
    return Timing(method, n, kind, "measured", pairs)
