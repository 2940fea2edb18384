"""The results file: whole at every moment, and refused with a reason when it is of something else."""

import json
import os

import pytest

from subquad.bench.results import Facts, Results, Setting, Timing, load, save
from subquad.runs.results_file import ResultsError

RESULTS = Results(
    Setting(heads=2, is_causal=True),
    {"processor": "a processor"},
    methods=["linear"],
    lengths=[64],
    timings=[Timing("linear", 64, "forward", rounds=[(0.5, 1.0), (0.25, None)])],
    facts=[Facts("linear", 64, peak_bytes=7, errors={"random": 0.5})],
    refusals={"svd": "because"},
)


def test_saved_and_loaded_again(tmp_path):
    path = tmp_path / "deep" / "results.json"
    save(RESULTS, path)
    assert load(path) == RESULTS
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    save(RESULTS, path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ResultsError, match=r"cannot be written to .*: No space left on device. Choose another folder"):
        save(Results(Setting(), {}), path)
    assert load(path) == RESULTS
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot be written"):
        save(RESULTS, tmp_path / "file" / "results.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not valid JSON"),
        ('{"schema": "subquad.compare", "ver', "is not valid JSON"),
        ("[]", "must have schema 'subquad.compare', version 1; got None"),
        ('{"schema": "other", "version": 1}', "got 'other', version 1"),
        ('{"schema": "subquad.compare", "version": 99}', "version 99"),
        ('{"schema": "subquad.compare", "version": 1}', "is not a valid results file of this version"),
    ],
)
def test_files_that_are_something_else(tmp_path, text, said):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=said):
        load(path)
    assert path.read_text() == text


def test_no_file(tmp_path):
    with pytest.raises(ResultsError, match="cannot be read: No such file"):
        load(tmp_path / "results.json")


def test_it_is_plain_json(tmp_path):
    path = tmp_path / "results.json"
    save(RESULTS, path)
    saved = json.loads(path.read_text())
    assert (saved["schema"], saved["version"]) == ("subquad.compare", 1)
    assert saved["timings"][0]["rounds"] == [[0.5, 1.0], [0.25, None]]
    assert os.stat(path).st_size < 2000
