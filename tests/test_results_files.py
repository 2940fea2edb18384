"""Results files of all three commands: what is not as it was written is refused with its place, and no text in them is obeyed."""

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import subquad as sq
from subquad.bench.results import load as load_comparison
from subquad.conversion.results import load as load_conversion
from subquad.report import write_page
from subquad.report.conversion import write_conversion_page
from subquad.report.training import write_training_page
from subquad.runs.results_file import ResultsError
from subquad.training.results import load as load_training
from tests.soak.damage import TAG
from tests.soak.files import fault_of_page

SAVED = Path(__file__).parent / "saved"
LOAD = {"comparison": load_comparison, "training": load_training, "conversion": load_conversion}
WRITE = {"comparison": write_page, "training": write_training_page, "conversion": write_conversion_page}
ROUND, RECORD = ["timings", 1, "rounds", 0], ["records", 0]
HEAD = ["diagnoses", "naive swap", "heads", 0]
DEEP = json.loads("[" * 200 + "]" * 200)
CHOSEN = ("schema", "method", "methods", "kind", "status", "metric", "dtype")  # text that must be one of a few, or a name


def changed(name, place, *value):
    """The saved results with another value at `place`, or without what is there."""
    saved = json.loads((SAVED / name / "results.json").read_text())
    target = saved
    for step in place[:-1]:
        target = target[step]
    if value:
        target[place[-1]] = value[0]
    else:
        del target[place[-1]]
    return saved


@pytest.mark.parametrize("name", LOAD)
def test_what_was_written_is_read(name):
    LOAD[name](SAVED / name / "results.json")


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("comparison", [*ROUND, 1], [0], r"timings\[1\]\.rounds\[0\]\[1\] must be an integer from 1e-09 to 1e\+09; got 0"),
        ("comparison", [*ROUND, 0], [math.nan], r"rounds\[0\]\[0\] must be a finite number; got nan"),
        ("comparison", [*ROUND, 0], [1e300], r"rounds\[0\]\[0\] must be a number from 1e-09 to 1e\+09; got 1e\+300"),
        ("comparison", ROUND, [[1]], r"rounds\[0\] must be a list of 2 entries; got \[1\]"),
        ("comparison", ["timings", 1, "status"], [[]], r"timings\[1\]\.status must be one of 'measured', .*; got \[\]"),
        ("comparison", ["timings", 1, "method"], ["../linear"], r"timings\[1\]\.method must be the name of a method; got '\.\./"),
        ("comparison", ["timings", 1], [{}], r"timings\[1\]\.method is missing"),
        ("comparison", ["timings", 1, "length"], [10**400], r"timings\[1\]\.length must be an integer of at most 64 bits"),
        ("comparison", ["timings", 1, "length"], [0], r"timings\[1\]\.length must be an integer from 1 to 1.67772e\+07; got 0"),
        ("comparison", ["timings", 1, "more"], [1], r"timings\[1\] must have no entries other than method, .*; got 'more'"),
        ("comparison", ["facts", 1, "peak_bytes"], [-1], r"facts\[1\]\.peak_bytes must be an integer from 0 to"),
        ("comparison", ["machine", "cores"], [DEEP], r"machine\['cores'\] must be text or an integer"),
        ("comparison", ["machine"], [], "machine is missing"),
        ("comparison", ["lengths"], [[32, 16]], r"lengths must be in ascending order, each once; got \[32, 16\]"),
        ("comparison", ["methods"], [["linear", "linear"]], "methods must have each entry once; got 'linear'"),
        ("comparison", ["timings", 1, "method"], ["sdpa"], r"timings must have each entry once; got \('sdpa', 16, 'forward'\)"),
        ("comparison", ["setting", "threads"], [True], r"setting\.threads must be an integer; got True"),
        ("training", [*RECORD, "method"], ["../victim"], r"records\[0\]\.method must be the name of a method; got '\.\./victim'"),
        ("training", [*RECORD, "losses", 0, 1], [math.inf], r"records\[0\]\.losses\[0\]\[1\] must be a finite number; got inf"),
        ("training", [*RECORD, "evals", 0], [{"accuracy": 1}], "the evals of linear must each have a step"),
        ("training", [*RECORD, "options"], [{"x": DEEP}], r"records\[0\]\.options\['x'\].* must be nested at most 16 levels"),
        ("training", ["settings"], [None], "settings must be an object; got None"),
        ("training", ["records"], [{}], r"records must be a list; got \{\}"),
        ("training", ["task", "higher_is_better"], ["no"], r"task\.higher_is_better must be true or false; got 'no'"),
        ("conversion", [*HEAD, "layer"], ["0"], r"diagnoses\['naive swap'\]\.heads\[0\]\.layer must be an integer; got '0'"),
        ("conversion", [*HEAD, "site"], ["other"], r"diagnoses\['transfer'\] must have no heads that 'naive swap' does not have"),
        ("conversion", HEAD[:2], [], r"diagnoses must begin with 'naive swap'; got \['transfer'\]"),
        ("conversion", ["kept"], [{"layers": [1], "losses": [1.0], "tried": []}], r"kept\.losses must be one before the search"),
        ("conversion", ["kept"], [{"layers": 1, "losses": [], "tried": []}], r"kept\.layers must be a list; got 1"),
        ("conversion", ["conversion", "sites"], [[]], r"conversion: config\.subquad is not a conversion record: sites must be an obj"),
        ("conversion", ["conversion", "sites", "layers.0.self_attn"], [{}], r"the mechanism of 'layers\.0\.self_attn' must be text"),
        ("conversion", ["conversion", "cache_layers"], [2**40], r"cache_layers must be an integer from 0 to 100000"),
        ("conversion", ["stages", "lora", "losses", 0], ["x"], r"stages\['lora'\]\.losses\[0\] must be a list; got 'x'"),
    ],
)  # fmt: skip
def test_what_is_something_else_is_refused_with_its_place(tmp_path, name, place, value, said):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(changed(name, place, *value)))
    with pytest.raises(ResultsError, match=rf"results\.json is not a valid results file of this version: .*{said}"):
        LOAD[name](path)


@pytest.mark.parametrize("name", LOAD)
@pytest.mark.parametrize(("content", "said"), [("[" * 100_000, "it is nested too deeply"), ("{", "it is not valid JSON")])
def test_what_is_no_json_is_refused(tmp_path, name, content, said):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ResultsError, match=rf"results\.json cannot be read: {said}.* Move it away, or start over with --fresh"):
        LOAD[name](path)


@pytest.mark.parametrize("name", LOAD)
@pytest.mark.parametrize("text", [f"</script><{TAG}>", f"\" {TAG}='' '", "\x1b]0;title\x07", "\ud800"])
def test_text_of_a_file_is_shown_and_not_obeyed(tmp_path, name, text):
    pytest.importorskip("vl_convert", reason="install subquad[report]")
    saved = json.loads((SAVED / name / "results.json").read_text())
    path, page = tmp_path / "results.json", tmp_path / "report.html"
    path.write_text(json.dumps(hostile(saved, text)))
    WRITE[name](LOAD[name](path), page)
    written = page.read_text()
    assert fault_of_page(written) == ""
    assert "\x1b" not in written
    assert written.count(TAG) > 3 or TAG not in text


def hostile(value, text, name=""):
    """The same with `text` in every place where any text may stand."""
    if isinstance(value, dict):
        return {key: hostile(entry, text, key) for key, entry in value.items()}
    if isinstance(value, list):
        return [hostile(entry, text, name) for entry in value]
    return f"{value}{text}" if isinstance(value, str) and name not in CHOSEN and value != "hybrid" else value


def test_a_page_without_measurements_is_refused(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(changed("conversion", ["diagnoses"], {})))
    with pytest.raises(sq.InputError, match="shows measurements; got results without any"):
        write_conversion_page(load_conversion(path), tmp_path / "report.html")
