"""The page as text: what stands in it, that nothing in it acts or loads, and that a file is whole or not there."""

import os
import re
import sys
from html.parser import HTMLParser

import pytest

import subquad as sq
from subquad.bench import analysis
from subquad.bench.results import BASELINE, Facts, Results, Setting, Timing
from subquad.report import write_page
from tests.report.made_up import FAILING, METHODS, REFUSED, made_up

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&{{7*7}}"


class Outline(HTMLParser):
    """The elements of a page with their attributes, and its text outside scripts and styles, by table."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.tables, self.words, self.inside = [], {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        if tag in ("script", "style", "table"):
            self.inside.append((tag, attributes.get("id")))

    def handle_endtag(self, tag):
        if self.inside and self.inside[-1][0] == tag:
            self.inside.pop()

    def handle_data(self, data):
        tag, name = self.inside[-1] if self.inside else (None, None)
        if tag == "table":
            self.tables.setdefault(name, []).append(data.strip())
        elif tag is None:
            self.words.append(data.strip())

    def cells(self, table):
        return [word for word in self.tables[table] if word]

    @property
    def text(self):
        return " ".join(word for word in self.words if word)


@pytest.fixture(scope="module")
def outline(page):
    return Outline(page.read_text())


def written(results, folder):
    write_page(results, folder / "a.html")
    return Outline((folder / "a.html").read_text())


def test_the_headline_comes_first(outline, results):
    assert analysis.headline(results) in outline.text
    order = ["headline", "time-title", "memory-title", "fidelity-title", "crossovers-title", "growth-title"]
    order += ["capabilities-title", "pictures-title", "not-run-title", "machine-title"]
    found = [a.get("id") or a.get("class") for tag, a in outline.elements if tag in ("p", "h2")]
    assert [name for name in found if name in order] == order


def test_every_method_is_in_every_place(outline):
    for table in ("crossovers", "growth", "capabilities", "forward-figures", "memory-figures"):
        assert set(METHODS) <= set(outline.cells(table)), table
    legend = {a["data-method"] for _, a in outline.elements if "data-method" in a}
    assert legend == {BASELINE, *METHODS}
    pictures = [a for tag, a in outline.elements if tag == "img"]
    assert {a["alt"].split(",")[0].split("(")[0] for a in pictures} == set(METHODS)
    assert all(a["src"].startswith("data:image/png;base64,") for a in pictures)


def test_the_crossover_table_has_starts_and_gains(outline, results):
    cells = outline.cells("crossovers")
    row = cells[cells.index("linear") :]
    gain = analysis.ratio(results, "linear", 16384, "forward")
    assert row[1] == "kernelized"
    assert row[2] == analysis.rounded(analysis.time_crossover(results, "linear", "forward").length)
    assert row[5].startswith(f"{gain.value:.3g}x ({gain.low:.3g} to {gain.high:.3g})")


def test_the_growth_table_stands_beside_the_papers(outline, results):
    cells = outline.cells("growth")
    row = cells[cells.index("linear") :]
    exponents = [
        f"N^{analysis.time_growth(results, 'linear', 'forward'):.2f}",
        f"N^{analysis.memory_growth(results, 'linear'):.2f}",
    ]
    info = sq.info("linear")
    assert row[1:6] == [exponents[0], info.time, exponents[1], info.memory, info.paper]


def test_every_status_has_its_reason(outline, results):
    cells = outline.cells("not-run")
    assert {"refused", "failed", "predicted"} <= set(cells)
    assert results.refusals[REFUSED] in cells
    assert cells[cells.index("failed") : cells.index("failed") + 4] == ["failed", "forward time", "32,768, 65,536", FAILING]
    assert "a call would take about 30 to 120 s, and the budget allows 12" in cells
    assert "cells were not run, because the time budget or the memory was too small" in outline.text


def test_the_machine_and_the_setting_are_named(outline, results):
    for fact in ("Made-up 9000", "abc1234", results.command, "8 heads of 64 channels", "float32", "cpu, 2 threads"):
        assert fact in outline.text


def test_nothing_is_loaded_from_elsewhere(page, outline):
    policy = next(a["content"] for tag, a in outline.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    for tag, attributes in outline.elements:
        for name in ("src", "href", "srcset", "poster", "action", "data"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
    style = re.search(r"<style>(.*?)</style>", page.read_text(), re.S).group(1)
    assert "url(" not in style
    assert "@import" not in style
    assert page.stat().st_size < 6e6


def test_the_library_is_there_once(page):
    assert page.read_text().count("window.vegaEmbed=") == 1


def test_names_and_reasons_cannot_act(tmp_path):
    results = made_up(["linear"], [256, 512])
    results.methods.append(HOSTILE)
    results.refusals[HOSTILE] = results.command = results.machine["processor"] = HOSTILE
    results.timings += [
        Timing(HOSTILE, 256, "forward", rounds=[(0.1, 0.2)]),
        Timing(HOSTILE, 512, "forward", "failed", why=HOSTILE),
    ]
    results.facts.append(Facts(HOSTILE, 256, peak_bytes=1000, errors={HOSTILE: 0.5}))
    found = written(results, tmp_path)
    assert not [a for _, a in found.elements if "onerror" in a]
    assert len([tag for tag, _ in found.elements if tag == "script"]) == 2
    for table in ("crossovers", "capabilities", "not-run", "forward-figures"):
        assert HOSTILE in found.cells(table)
    assert {a["data-method"] for _, a in found.elements if "data-method" in a} == {BASELINE, "linear", HOSTILE}


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_comparison_that_has_measured_nothing(is_finished, tmp_path):
    found = written(Results(Setting(), {}, finished=is_finished), tmp_path)
    assert "Times were not measured." in found.text
    assert ("not finished" in found.text) is not is_finished


def test_one_length_one_round_one_pass(tmp_path):
    results = Results(Setting(), {}, methods=["linear"], lengths=[512], finished=True)
    results.timings = [
        Timing(BASELINE, 512, "forward", rounds=[(2.0, 2.0)]),
        Timing("linear", 512, "forward", rounds=[(1.0, 2.0)]),
    ]
    found = written(results, tmp_path)
    assert "2x (one round)" in found.cells("crossovers")
    assert "No memory was measured." in found.text
    assert not [a for tag, a in found.elements if tag == "input"]


def test_causal_comparisons_have_causal_pictures(tmp_path):
    results = made_up(["linear", "local"], [256, 512])
    results.setting = Setting(is_causal=True)
    pictures = [a["alt"] for tag, a in written(results, tmp_path).elements if tag == "img"]
    assert pictures
    assert all(", causal" in alt for alt in pictures)


def test_an_existing_page_is_replaced_or_kept(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError(28, "No space left on device")

    results = Results(Setting(), {})
    (tmp_path / "a.html").write_text("old")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(sq.InputError, match="No space left"):
            write_page(results, tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text() == "old"
    write_page(results, tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert os.listdir(tmp_path) == ["a.html"]


@pytest.mark.parametrize("missing", ["altair", "vl_convert", "jinja2"])
def test_a_missing_extra_says_what_to_install(missing, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        sq.MissingExtraError, match=rf"the HTML report needs the extra subquad\[report\]; {missing} is not installed"
    ):
        write_page(Results(Setting(), {}), tmp_path / "a.html")
    assert not os.listdir(tmp_path)
