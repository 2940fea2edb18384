"""Charts as files, the rows behind them, and the places of labels."""

import os
import sys
from xml.etree import ElementTree

import pytest

import subquad as sq
from subquad.bench.results import BASELINE, Facts, Results, Setting, Timing
from subquad.report import figures, labels, save_charts
from subquad.report.charts import charts
from subquad.report.labels import label_positions, on_log_axis
from subquad.report.styles import method_styles
from tests.report.made_up import FAILING, LONGEST_RUN, METHODS


def words(path):
    return set(ElementTree.parse(path).getroot().itertext())


def test_every_chart_in_every_choice_and_format(results, tmp_path):
    paths = save_charts(results, tmp_path / "new")
    names = ["time_forward", "time_training", "time_decode", "memory", "fidelity_random", "fidelity_peaked"]
    assert [p.name for p in paths] == [f"{name}.{ending}" for name in names for ending in ("png", "svg")]
    assert sorted(os.listdir(tmp_path / "new")) == sorted(p.name for p in paths)
    assert all(p.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for p in paths[::2])
    for path in (tmp_path / "new").glob("*.svg"):
        assert words(path) >= {*METHODS}, path
    assert words(tmp_path / "new" / "time_forward.svg") >= {"SDPA", "256", "64k", "10 ms"}


def test_a_choice_changes_what_is_drawn(results, tmp_path):
    save_charts(results, tmp_path, formats=["svg"])
    forward, training, decode = ((tmp_path / f"time_{kind}.svg").read_text() for kind in ("forward", "training", "decode"))
    assert len({forward, training, decode}) == 3
    assert "stroke-dasharray" in training


def test_only_known_formats(results, tmp_path):
    with pytest.raises(sq.InputError, match="png or svg; got 'gif'"):
        save_charts(results, tmp_path, formats=["gif"])


def test_a_missing_extra_says_what_to_install(results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(sq.MissingExtraError, match=r"a chart in a file needs the extra subquad\[report\]"):
        save_charts(results, tmp_path)


def test_nothing_measured_is_no_chart():
    assert charts(Results(Setting(), {})) == []


def test_rows_say_whether_they_were_measured(results):
    rows = figures.time_rows(results)
    forward = [row for row in rows if row["kind"] == "forward" and row["method"] == BASELINE]
    assert [row["length"] for row in forward if row["is_predicted"]] == [32768, 65536]
    assert [row["length"] for row in forward if row["joins"]] == [LONGEST_RUN, 32768, 65536]
    assert forward[-1]["status"] == "predicted: a call would take about 120 s, and the budget allows 12"
    assert not [row for row in rows if row["method"] == FAILING and row["length"] > LONGEST_RUN]


def test_fidelity_is_of_the_longest_length_with_an_error():
    results = Results(Setting(), {}, methods=["linear", "local"], lengths=[256, 512])
    results.timings = [Timing(m, n, "forward", rounds=[(1.0, 3.0)]) for m in results.methods for n in results.lengths]
    results.facts = [Facts("linear", 256, errors={"random": 0.5}), Facts("linear", 512, errors={"random": 0.7})]
    results.facts += [Facts("local", 256, errors={"random": 0.0})]
    linear, local = figures.fidelity_rows(results)
    assert (linear["label"], linear["error"], linear["gain"]) == ("linear", 0.7, pytest.approx(3))
    assert (local["label"], local["relative"]) == ("local (256)", "0")
    assert local["error"] > 0


def test_a_method_keeps_its_look_whatever_else_is_drawn():
    alone = {style.method: style for style in method_styles(["performer"])}
    assert alone["performer"] == {style.method: style for style in method_styles(METHODS)}["performer"]
    seen = [(style.light, style.shape) for style in method_styles(sq.methods())]
    assert len(set(seen)) == len(seen)
    assert method_styles(METHODS)[0].is_baseline


def test_labels_do_not_overlap():
    crowd = [(100 + 9 * i, 100 + 5 * i, f"method {i}") for i in range(12)]
    places = label_positions(crowd, 400, 300)
    assert sum(bool(place.align) for place in places) >= 6
    boxes = [labels._box(x + p.dx, y + p.dy, p.align, text) for (x, y, text), p in zip(crowd, places, strict=True) if p.align]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if labels._overlap(a, b)]


def test_a_log_axis():
    assert on_log_axis([1, 10, 100], 120, 10) == pytest.approx([10, 60, 110])
    assert on_log_axis([10, 100], 120, 10, 1) == pytest.approx([60, 110])
    assert on_log_axis([5], 120, 10) == [10]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0000123, "12.3 µs"), (0.0123, "12.3 ms"), (0.9999, "1,000 ms"), (12.34, "12.3 s"), (4000, "4,000 s")],
)
def test_durations(seconds, text):
    assert figures.duration(seconds) == text
