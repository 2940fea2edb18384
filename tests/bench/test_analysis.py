"""What the measurements say, on measurements whose answer is known."""

import math

import pytest

from subquad.bench import analysis
from subquad.bench.results import BASELINE, Facts, Results, Setting, Timing

LENGTHS = [256, 512, 1024, 2048, 4096]


def made(gain, *, rounds=3, kind="forward"):
    """A method that takes N microseconds, and a baseline that takes `gain(N)` times as long."""
    results = Results(Setting(), {}, methods=["linear"], lengths=LENGTHS)
    for n in LENGTHS:
        base = n * 1e-6 * gain(n)
        results.timings.append(Timing(BASELINE, n, kind, rounds=[(base, base)] * rounds))
        results.timings.append(Timing("linear", n, kind, rounds=[(n * 1e-6, base)] * rounds))
        results.facts += [Facts(BASELINE, n, peak_bytes=n * n), Facts("linear", n, peak_bytes=600 * n)]
    return results


def test_a_ratio_is_of_the_same_rounds():
    results = made(lambda n: n / 1000)
    timing = results.timing("linear", 4096, "forward")
    timing.rounds = [(1.0, 2.0), (10.0, 20.0), (100.0, 200.0)]  # the machine slowed down, for both
    ratio = analysis.ratio(results, "linear", 4096, "forward")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))
    assert not ratio.is_predicted


def test_the_interval_is_students():
    results = made(lambda n: 1)
    results.timing("linear", 256, "forward").rounds = [(1.0, math.e), (1.0, math.e**2), (1.0, math.e**3)]
    ratio = analysis.ratio(results, "linear", 256, "forward")
    assert math.log(ratio.value) == pytest.approx(2)
    assert math.log(ratio.high) == pytest.approx(2 + 4.303 / math.sqrt(3), rel=1e-3)
    assert math.log(ratio.low) == pytest.approx(2 - 4.303 / math.sqrt(3), rel=1e-3)


def test_one_round_has_no_interval():
    ratio = analysis.ratio(made(lambda n: 3, rounds=1), "linear", 256, "forward")
    assert ratio.value == pytest.approx(3)
    assert ratio.low is ratio.high is None


def test_predictions_are_marked():
    results = made(lambda n: 3)
    timing = results.timing(BASELINE, 4096, "forward")
    timing.rounds, timing.predicted, timing.status = [], 5.0, "predicted"
    own = results.timing("linear", 4096, "forward")
    own.rounds = [(2.0, None)]
    ratio = analysis.ratio(results, "linear", 4096, "forward")
    assert ratio.value == 2.5
    assert ratio.is_predicted
    assert analysis.ratio(results, "linear", 4096, "training") is None


def test_growth():
    results = made(lambda n: n)
    assert analysis.time_growth(results, "linear", "forward") == pytest.approx(1)
    assert analysis.time_growth(results, BASELINE, "forward") == pytest.approx(2)
    assert analysis.memory_growth(results, BASELINE) == pytest.approx(2)
    assert analysis.time_growth(results, "linear", "decode") is None


@pytest.mark.parametrize("crossing", [300.0, 700.0, 3000.0])
def test_crossover_between_lengths(crossing):
    found = analysis.time_crossover(made(lambda n: n / crossing), "linear", "forward")
    assert found.length == pytest.approx(crossing)
    assert not found.at_most


def test_crossover_for_memory():
    assert analysis.memory_crossover(made(lambda n: 1), "linear").length == pytest.approx(600)


def test_crossover_at_the_ends():
    assert analysis.time_crossover(made(lambda n: 2), "linear", "forward") == analysis.Crossing(256, at_most=True)
    assert analysis.time_crossover(made(lambda n: 0.5), "linear", "forward") is None
    assert analysis.crossover([]) is None


def test_a_gain_that_is_lost_again_does_not_count():
    assert analysis.crossover([(1, 2.0), (2, 0.5), (4, 2.0)]).length == pytest.approx(2 * math.sqrt(2))
    assert analysis.crossover([(1, 0.5), (2, 2.0), (4, 0.9)]) is None


def test_headline():
    assert analysis.headline(made(lambda n: n / 700)) == (
        "From 700 tokens on, linear is faster than SDPA on this machine; at 4,096 tokens it is 5.9x faster."
    )
    assert analysis.headline(made(lambda n: 2)).startswith("At every measured length, linear is faster")
    assert analysis.headline(made(lambda n: 0.5)).startswith("At these lengths no method is faster")
    assert analysis.headline(Results(Setting(), {}, methods=["linear"])) == "Nothing has been measured yet."
    refused = Results(Setting(), {}, refusals={"nystrom": "it is not causal"})
    assert analysis.headline(refused) == "None of these methods can be compared."


@pytest.mark.parametrize(("length", "text"), [(7, "7"), (42.4, "42"), (1449, "1,400"), (65536, "66,000")])
def test_rounded(length, text):
    assert analysis.rounded(length) == text


def test_a_start_inside_the_noise_is_not_certain():
    results = made(lambda n: n / 700)
    assert analysis.time_crossover(results, "linear", "forward").is_certain
    last = results.timing("linear", LENGTHS[-1], "forward")
    last.rounds = [(1.0, 0.5), (1.0, 2.0), (1.0, 2.2)]
    assert not analysis.time_crossover(results, "linear", "forward").is_certain


def test_predictions_prove_no_start():
    results = made(lambda n: n / 700)
    for timing in results.timings:
        timing.rounds, timing.predicted, timing.status = [], 1.0, "predicted"
    assert analysis.time_crossover(results, "linear", "forward") is None
