"""The harness of the soak test: it finds every kind of fault, survives it, and resumes. And a short run of every part."""

import json
import subprocess
import sys
import time

import pytest

from tests.soak import __main__ as command
from tests.soak import faulty, progress, report
from tests.soak.run import Settings, run_one, run_part

FAULTY = {"part": "cases", "seed": 3, "module": "tests.soak.faulty"}


def test_every_kind_of_end_is_found_and_survived_and_a_run_resumes(tmp_path):
    run_part(Settings(out=tmp_path, cases=2, workers=1, **FAULTY))
    saved = progress.load(tmp_path, "cases", 3)
    saved.add(7, {"verdict": "answered"}, 0.1)  # a worker was faster than the others
    progress.save(tmp_path, saved)
    seen = []
    found = run_part(Settings(out=tmp_path, cases=9, workers=2, **FAULTY), lambda p: seen.append(p.done))
    assert seen == [4, 5, 6, 7, 8, 9]  # neither 0 and 1 nor 7 again
    assert found.following == 9
    assert found.verdicts == {"answered": 4, "refused": 1, "wrong": 1, "foreign error": 1, "crash": 2}
    by_index = {finding["index"]: finding for finding in found.findings}
    assert set(by_index) == {2, 3, 4, 5}
    assert by_index[2]["reproduction"] == "small 2"
    assert "RuntimeError: an error of another library" in by_index[3]["error"]
    assert "code -11" in by_index[4]["error"]
    assert by_index[5]["error"] == "no end within 5 s"
    assert all(f["command"].endswith(f"--part cases --seed 3 --only {i}") for i, f in by_index.items())
    assert found.counts["stride"]["lazy"] == {"answered": 3, "refused": 1, "wrong": 1}
    kept = {path.name for path in (tmp_path / "cases-seed-3").iterdir() if path.is_dir()}
    assert kept == {"2", "4", "5"}  # of findings


def test_the_time_ends_a_run(tmp_path):
    found = run_part(Settings(out=tmp_path, cases=10**9, deadline=time.monotonic() - 1, **FAULTY))
    assert found.done == 0


def test_one_case_alone(tmp_path):
    settings = Settings(out=tmp_path, cases=1, **FAULTY)
    assert run_one(settings, faulty.WAYS.index("dies"))["verdict"] == "crash"
    assert not list(tmp_path.glob("*.json"))


def test_the_results_as_a_table_and_as_a_page(tmp_path):
    run_part(Settings(out=tmp_path, cases=4, workers=1, **FAULTY))
    results = report.write_results(tmp_path, 3)
    assert results == json.loads((tmp_path / "results.json").read_text())
    assert results["parts"]["cases"]["classes"] == {"foreign error": 1, "wrong, local": 1}
    assert report.has_findings(results)
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- soak:summary -->\nold\n<!-- soak:end -->\nb\n<!-- soak:cases -->\n<!-- soak:end -->\n<!-- soak:kills -->\n<!-- soak:end -->\n"
    )
    assert command.main(["--report", str(page), "--out", str(tmp_path)]) == 0
    text = page.read_text()
    assert "| Random calls | 4 | 1 | 1 | 1 | 1 | 0 | `python -m tests.soak --part cases --seed 3 --cases 4` |" in text
    assert "| lazy | 3 | 1 | 1 | 1 |" in text
    assert "old" not in text
    assert text.endswith(f"<!-- soak:kills -->\n{report.NOT_RUN}<!-- soak:end -->\n")
    assert report.rendered(text, json.loads(page.with_suffix(".json").read_text())) == text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["cases", "kills", "files", "address", "undefined", "thread"]),
        (["files,native", "cases"], ["files", "address", "undefined", "thread", "cases"]),
    ],
)
def test_parts_by_name(given, expected):
    assert command.chosen_parts(given) == expected


def test_an_unknown_part():
    done = subprocess.run([sys.executable, "-m", "tests.soak", "--part", "nothing"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "--part must be one of cases, kills" in done.stderr
