"""The tables, the charts and the page of a conversion."""

import re
from dataclasses import replace

import pytest

from subquad.conversion.diagnosis import Diagnosis, Head
from subquad.conversion.repair.keep_search import Kept
from subquad.conversion.repair.schedule import StageProgress
from subquad.conversion.results import Results
from subquad.report.conversion import conversion_charts, headline, heads, summary, trail, write_conversion_page
from tests.report.test_page import HOSTILE, Outline

SITES = ["layers.0.self_attn", "layers.1.self_attn", "layers.2.self_attn"]
MEASURES = ("error-swap", "error-now", "kl-swap", "kl-now")


def diagnosis(scale, loss, sites=SITES, has_weights=True):
    found = [
        Head(site, int(site.split(".")[-2]), head, scale * (0.1 + 0.2 * i + 0.05 * head), scale * head if has_weights else None)
        for i, site in enumerate(sites)
        for head in range(4)
    ]
    return Diagnosis(tuple(found), 1 - scale / 4, None if loss is None else 2.0, loss, 640)


def made_up():
    """A conversion of three layers, one of which was put back to softmax, with both stages."""
    stages = {
        "transfer": StageProgress("transfer", 6, 1e-2, 6, 75.0, 0.2, [(0, 0.5), (3, 0.3), (6, 0.2)], "all steps are done"),
        "lora": StageProgress("lora", 6, 5e-4, 4, 30.0, 2.1, [(0, 2.6), (4, 2.2)], "1 minutes are over"),
    }
    diagnoses = {
        "naive swap": diagnosis(1.0, 4.0),
        "keep": diagnosis(0.9, 3.5, SITES[:2]),
        "transfer": diagnosis(0.6, 3.0, SITES[:2]),
        "lora": diagnosis(0.5, 2.25, SITES[:2]),
    }
    return Results(
        "models/tiny", "LlamaForCausalLM", "hybrid", {"window": 2, "map": "hedgehog"},
        {"model": "models/tiny", "layers": "all", "keep": 1, "loss": "language", "gguf": None, "text": "0123"},
        {"processor": "a processor", "commit": None},
        "subquad convert models/tiny --method hybrid",
        {"files": ["a.txt", "b.txt"], "judged_by": 640, "learnt_from": 5760},
        {"sites": {site: {"name": "hybrid" if site in SITES[:2] else "softmax"} for site in SITES}},
        diagnoses,
        kept=Kept((2,), (4.0, 3.5), ((0, 0, 3.9), (0, 1, 3.8), (0, 2, 3.5))),
        stages=stages,
        is_saved=True,
    )  # fmt: skip


def swapped(**more):
    """Nothing but the swap."""
    results = made_up()
    return replace(results, diagnoses={"naive swap": results.naive}, stages={}, kept=None, **more)


@pytest.fixture(scope="module")
def outline(tmp_path_factory):
    path = tmp_path_factory.mktemp("conversion") / "report.html"
    write_conversion_page(made_up(), path)
    return Outline(path.read_text())


def test_the_table_goes_from_the_original_to_the_last_part():
    rows = [[cell.text for cell in row] for row in summary(made_up()).rows]
    assert [row[0] for row in rows] == ["original", "naive swap", "layer 2 kept", "after transfer", "after lora"]
    assert rows[0] == ["original", "2.0000", "7.39", "1.0000", "-", "-", "-"]
    assert rows[1] == ["naive swap", "4.0000", "54.6", "0.7500", "0.3750", "-", "-"]
    assert rows[4] == ["after lora", "2.2500", "9.49", "0.8750", "0.1375", "4", "0.5 min"]


def test_the_headline_says_what_was_lost_and_what_came_back():
    what = "LlamaForCausalLM with hybrid in 2 of its 3 attention modules."
    change = "The swap takes its perplexity from 7.39 to 54.6"
    kept = "The swap takes its perplexity from 7.39 to 33.1"
    assert headline(made_up()) == f"{what} {kept}; after low-rank finetuning the perplexity is 9.49."
    better = made_up()
    better.diagnoses["lora"] = diagnosis(0.5, 1.5, SITES[:2])
    assert headline(better).endswith("the perplexity is 4.48, lower than the original's, because it has also learned the text.")
    assert headline(swapped()) == f"{what} {change}."
    assert headline(replace(made_up(), diagnoses={})) == f"{what} Nothing was measured, because there was no text."
    encoder = replace(made_up(), diagnoses={"naive swap": diagnosis(1.0, None), "lora": diagnosis(0.5, None)})
    assert "at a cosine of 0.750 to the original's; after low-rank finetuning the cosine is 0.875." in headline(encoder)
    assert [cell.text for cell in summary(encoder).rows[1][1:4]] == ["-", "-", "0.7500"]


def test_the_heads_with_the_most_damage_come_first():
    table = heads(made_up(), 3)
    assert [row[0].text for row in table.rows] == ["layer 1, head 3", "layer 1, head 2", "layer 1, head 1"]
    assert [cell.text for cell in table.rows[0][1:]] == ["0.4500", "3.0000", "0.2250", "1.5000"]
    assert len(heads(swapped()).headings) == 3
    assert len(heads(swapped()).rows) == 12


def test_the_trail_has_the_second_best():
    [row] = trail(made_up()).rows
    assert [cell.text for cell in row] == ["1", "2", "3.5000", "4.0000", "1", "3.8000"]
    assert not trail(swapped()).rows


def test_both_maps_have_the_same_colours_and_rows():
    found = {chart.name: chart for chart in conversion_charts(made_up())}
    assert list(found) == [*MEASURES, "repair"]
    for name in MEASURES:
        colours, layers = (found[name].spec["encoding"][axis]["scale"] for axis in ("color", "y"))
        assert colours["domain"][1] == pytest.approx(0.65 if name.startswith("error") else 3.0)
        assert layers["domain"] == ["0", "1", "2"]
    assert len(found["error-swap"].spec["datasets"]["rows"]) == 12
    assert len(found["error-now"].spec["datasets"]["rows"]) == 8, "what is softmax again has none"
    assert found["repair"].kinds == ("transfer", "lora")


def test_maps_only_of_what_there_is():
    assert [chart.name for chart in conversion_charts(swapped())] == ["error-swap", "kl-swap"]
    blind = replace(swapped(), diagnoses={"naive swap": diagnosis(1.0, 4.0, has_weights=False)})
    assert [chart.name for chart in conversion_charts(blind)] == ["error-swap"]
    assert conversion_charts(replace(made_up(), diagnoses={})) == []


def test_layers_of_two_stacks_have_their_whole_names():
    both = replace(
        swapped(), diagnoses={"naive swap": diagnosis(1.0, None, ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"])}
    )
    domain = conversion_charts(both)[0].spec["encoding"]["y"]["scale"]["domain"]
    assert domain == ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"]


def test_the_page_has_all_of_it(outline):
    assert headline(made_up()) in outline.text
    assert {attributes["data-chart"] for tag, attributes in outline.elements if "data-chart" in attributes} == {
        *MEASURES,
        "repair",
    }
    assert {"summary", "heads", "trail"} == set(outline.tables)
    for words in ("Relative error by layer and head", "KL divergence by layer and head", "After low-rank finetuning"):
        assert words in outline.text
    for fact in (
        "subquad convert models/tiny --method hybrid",
        "a processor",
        "640",
        "5,760",
        "hedgehog",
        "1 minutes are over",
    ):
        assert fact in outline.text
    assert "not finished" not in outline.text


def test_nothing_is_loaded(tmp_path):
    write_conversion_page(made_up(), tmp_path / "a.html")
    head = re.sub(r"<script.*?</script>", "", (tmp_path / "a.html").read_text(), flags=re.DOTALL)
    assert "http" not in head.replace("http-equiv", "")


def test_a_page_of_the_swap_alone_says_that_it_is_not_finished(tmp_path):
    write_conversion_page(swapped(is_saved=False), tmp_path / "a.html")
    found = Outline((tmp_path / "a.html").read_text())
    assert "This conversion is not finished" in found.text
    assert "After low-rank" not in found.text
    assert "Repair" not in found.text


def test_names_cannot_act(tmp_path):
    results = replace(made_up(), model=HOSTILE, architecture=HOSTILE, options={HOSTILE: HOSTILE}, command=HOSTILE)
    write_conversion_page(results, tmp_path / "a.html")
    found = Outline((tmp_path / "a.html").read_text())
    assert not [attributes for tag, attributes in found.elements if tag == "img" or "onerror" in attributes]
    assert HOSTILE in found.text
