"""Advice: only what can do the work, ranked by what was measured."""

import pytest

import subquad as sq
from subquad.bench import ResultsError, advise, save
from subquad.bench.advise import _code
from subquad.bench.results import BASELINE, Facts, Results, Setting, Timing

GAINS = {"linear": 8.0, "local": 4.0, "performer": 2.0, "nystrom": 6.0, "reformer": 0.5}
ERRORS = {"linear": 0.9, "local": 0.3, "performer": 0.5, "nystrom": 0.4, "reformer": 0.2}
BYTES = {"linear": 30, "local": 20, "performer": 40, "nystrom": 10, "reformer": 5}


@pytest.fixture
def results():
    made = Results(Setting(), {}, methods=list(GAINS), lengths=[1024, 4096])
    for n in (1024, 4096):
        for kind in ("forward", "training", "decode"):
            made.timings.append(Timing(BASELINE, n, kind, rounds=[(1.0, 1.0)] * 3))
            made.timings += [Timing(m, n, kind, rounds=[(4096 / n / gain, 1.0)] * 3) for m, gain in GAINS.items()]
        made.facts.append(Facts(BASELINE, n, peak_bytes=n * 2**20))
        made.facts += [Facts(m, n, peak_bytes=BYTES[m] * 2**20, errors={"random": ERRORS[m]}) for m in GAINS]
    return made


def names(advice):
    return [a.method.info.name for a in advice]


def test_the_fastest_the_nearest_and_the_smallest(results):
    advice = advise(4096, results=results)
    assert names(advice) == ["linear", "local", "nystrom"]
    assert advice[0].times_sdpa == pytest.approx(8)
    assert "a forward pass is 8.0x faster than with SDPA" in advice[0].reasons[0]
    assert "closest to softmax: error 30%" in advice[1].reasons[0]
    assert "least memory: 10 MiB" in advice[2].reasons[0]
    assert advice[0].code == 'sq.attention(q, k, v, "linear")'


def test_what_cannot_do_the_work_is_left_out(results):
    results.setting = Setting(is_causal=True)
    assert "nystrom" not in names(advise(4096, is_causal=True, results=results))
    results.setting = Setting()
    assert names(advise(4096, cross=True, results=results)) == ["linear", "performer"]


def test_where_nothing_gains_softmax_stays(results):
    (only,) = advise(512, cross=True, enable_gqa=True, results=_slow(results))
    assert only.method == sq.Softmax()
    assert "nothing that supports this is faster" in only.reasons[0]


def _slow(results):
    for timing in results.timings:
        timing.rounds = [(2.0, 1.0)] * 3
    return results


def test_between_lengths_on_a_line_of_logarithms(results):
    (first, *_) = advise(2048, results=results)
    assert first.times_sdpa == pytest.approx(4)


def test_an_exact_window_sets_the_option(results):
    advice = advise(4096, exact_window=100, results=results)
    assert names(advice) == ["local"]
    assert advice[0].code == "sq.attention(q, k, v, sq.Local(window=100))"
    assert advice[0].reasons[-1] == "estimated from a measurement with window=256"


def test_causal_work_gets_causal_code(results):
    results.setting = Setting(is_causal=True)
    assert all("is_causal=True" in advice.code for advice in advise(4096, is_causal=True, results=results))


def test_errors_on_real_inputs_count_for_more(results):
    for fact in results.facts:
        fact.errors["real"] = 0.01 if fact.method == "nystrom" else 0.9
    nearest = next(a for a in advise(4096, results=results) if a.method.info.name == "nystrom")
    assert nearest.error == pytest.approx(0.01)


def test_a_wider_window_costs_more(results):
    (wide,) = advise(4096, exact_window=512, results=results)
    assert wide.times_sdpa == pytest.approx(GAINS["local"] / 2)
    (only,) = advise(4096, exact_window=4095, results=results)
    assert only.method == sq.Softmax()


def test_beyond_what_was_measured(results):
    longest = max(results.lengths)
    found = advise(2 * longest, results=results)
    assert all(a.measured_to == longest for a in found)
    assert all(any(r.startswith("extrapolated") for r in a.reasons) for a in found)
    with pytest.raises(ResultsError, match=f"at most 16 times the longest measured one, {longest:,}; got"):
        advise(17 * longest, results=results)


def test_what_must_be_trained_with_says_so(results):
    said = {a.method.info.name: any("must be trained with it" in r for r in a.reasons) for a in advise(4096, results=results)}
    assert said["linear"]
    assert not said.get("nystrom", False)


def test_the_code_runs(results):
    import torch

    q = k = v = torch.randn(1, 2, 64, 16)
    for advice in (*advise(4096, results=results), *advise(4096, exact_window=5, results=results)):
        assert eval(advice.code, {"sq": sq, "q": q, "k": k, "v": v}).shape == q.shape


def test_the_code_for_one_tensor_as_query_and_key():
    import torch

    q = v = torch.randn(1, 2, 64, 16)
    assert eval(_code(sq.Reformer(), False), {"sq": sq, "q": q, "v": v}).shape == q.shape


def test_results_from_a_folder(results, tmp_path):
    save(results, tmp_path / "results.json")
    for given in (tmp_path, str(tmp_path), tmp_path / "results.json"):
        assert advise(4096, results=given) == advise(4096, results=results)
    with pytest.raises(sq.InputError, match="results must be those of a comparison"):
        advise(4096, results=7)
    with pytest.raises(ResultsError, match="cannot be read"):
        advise(4096, results=tmp_path / "nothing")


def test_results_that_do_not_fit(results):
    with pytest.raises(ResultsError, match="are for bidirectional attention"):
        advise(4096, is_causal=True, results=results)
    results.timings = [t for t in results.timings if t.kind != "training"]
    with pytest.raises(ResultsError, match="have no training times"):
        advise(4096, training=True, results=results)


def test_bad_input(results):
    with pytest.raises(sq.InputError, match="length must be an integer"):
        advise(0, results=results)
    with pytest.raises(sq.InputError, match="exact_window must be an integer"):
        advise(64, exact_window=-1, results=results)


def test_a_quick_comparison_is_run_where_there_is_none():
    advice = advise(256, budget=20.0, exact_window=16)
    assert 1 <= len(advice) <= 3
    assert {a.method.info.name for a in advice} <= {"softmax", "local", "longformer", "pooled"}
