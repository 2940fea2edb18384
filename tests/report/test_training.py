"""The table, the charts and the page of a training run."""

import re

import pytest

from subquad.report.training import summary, training_charts, write_training_page
from subquad.training.results import Record, Results
from tests.report.test_page import HOSTILE, Outline

TASK = {"name": "parity", "idea": "sums of bits", "kind": "causal", "metric": "bits", "higher_is_better": False, "source": ""}


def made_up(**task):
    """A run with a method in every state."""
    done = {"status": "done", "step": 8, "steps": 8, "parameters": 1234, "peak_bytes": 3 * 2**20, "seconds": 9.0}
    curves = {
        "losses": [(4, 2.0), (8, 1.5)],
        "evals": [{"step": 4.0, "bits": 3.0, "loss": 2.1}, {"step": 8.0, "bits": 2.5, "loss": 1.9}],
    }
    return Results(
        {**TASK, **task},
        {"task": "parity", "dim": 16, "epochs": None, "options": {}},
        {"processor": "a processor", "commit": None},
        "subquad train parity --method all",
        [
            Record("local", {"window": 2}, best_step=8, test={"bits": 2.75, "loss": 1.95}, step_seconds=0.5, **done, **curves),
            Record("linear", {}, best_step=4, test={"bits": 2.25, "loss": 1.65}, step_seconds=0.25, **done, **curves),
            Record("softmax", {}, status="diverged", why="the loss is nan at step 3", step=2, steps=8, losses=[(1, 2.0)]),
            Record("nystrom", {}, status="refused", why="causal attention: landmarks"),
            Record("taylor", {}),
        ],
    )


def test_the_best_score_comes_first_and_what_has_none_says_its_state():
    table = summary(made_up())
    assert [row[0].text for row in table.rows] == ["linear", "local", "softmax", "nystrom", "taylor"]
    assert [cell.text for cell in table.rows[0]] == ["linear", "2.25", "1.65", "250 ms", "3 MiB", "1,234", "8", "9 s"]
    assert [row[1].text for row in table.rows[2:]] == ["diverged", "refused", "waiting"]
    assert table.rows[2][6].text == "2 of 8"
    assert [row[0].text for row in summary(made_up(higher_is_better=True)).rows][:2] == ["local", "linear"]


def test_the_chart_has_a_choice_for_every_figure():
    (chart,) = training_charts(made_up())
    assert chart.kinds == ("training loss", "validation bits", "validation loss")
    rows = chart.spec["datasets"]["rows"]
    assert {row["method"] for row in rows} == {"local", "linear", "softmax"}
    assert [(r["step"], r["value"]) for r in rows if (r["method"], r["kind"]) == ("linear", "validation bits")] == [
        (4, 3.0),
        (8, 2.5),
    ]


def test_a_long_line_has_few_marks_and_a_short_one_all():
    results = made_up()
    results.records[0].losses = [(step, 1.0) for step in range(1, 200)]
    (chart,) = training_charts(results)
    marked = [(row["method"], row["step"]) for row in chart.spec["datasets"]["rows"] if row["is_marked"]]
    assert [step for method, step in marked if method == "local"] == [*range(1, 200, 10), 4, 8, 4, 8]
    assert [step for method, step in marked if method == "linear"] == [4, 8, 4, 8, 4, 8]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_training_page(made_up(), path)
    return path.read_text()


def test_the_page_says_what_there_is(text):
    outline = Outline(text)
    for words in (
        "parity: one model, one task, 5 methods",
        "sums of bits",
        "bits: lower is better",
        "not finished",
        "a processor",
    ):
        assert words in outline.text
    assert "linear" in outline.cells("summary")
    assert outline.cells("reasons")[3:] == [
        "softmax", "diverged", "the loss is nan at step 3", "nystrom", "refused", "causal attention: landmarks", "taylor", "waiting",
        "not finished",
    ]  # fmt: skip
    assert "hide all but" in outline.text
    assert "SDPA" not in outline.text


def test_the_page_loads_nothing(text):
    outline = Outline(text)
    for tag, attributes in outline.elements:
        for name in ("src", "href"):
            assert not re.match(r"(https?:)?//", attributes.get(name) or ""), (tag, attributes)


def test_a_run_without_a_step_has_a_page_too(tmp_path):
    results = made_up()
    results.records = results.records[3:]
    write_training_page(results, tmp_path / "a.html")
    assert "No step has been made yet" in (tmp_path / "a.html").read_text()


def test_names_and_reasons_cannot_act(tmp_path):
    results = made_up(name=HOSTILE, idea=HOSTILE)
    results.records[3].why = HOSTILE
    write_training_page(results, tmp_path / "a.html")
    outline = Outline((tmp_path / "a.html").read_text())
    assert not [attributes for tag, attributes in outline.elements if tag == "img" or "onerror" in attributes]
    assert HOSTILE in outline.cells("reasons")
