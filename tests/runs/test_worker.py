"""Worker processes import what the process that starts them imports, from the same places."""

import sys

import pytest

from subquad.runs.worker import Worker


@pytest.mark.parametrize("is_searched", [False, True])
def test_the_working_folder_is_searched_only_if_this_process_searches_it(tmp_path, monkeypatch, is_searched):
    """Without it, a file `json.py` in the folder where one starts a command would run."""
    (tmp_path / "json.py").write_text("open('executed', 'w').close()")
    (tmp_path / "mine.py").write_text("def main(): open('called', 'w').close()")
    monkeypatch.chdir(tmp_path)
    paths = [path for path in sys.path if path]
    monkeypatch.setattr(sys, "path", [*paths, ""] if is_searched else paths)
    with (tmp_path / "log").open("w") as log:
        worker = Worker("mine:main", log)
        assert (worker.wait() == 0) == is_searched
    assert (tmp_path / "called").exists() == is_searched
    with (tmp_path / "log").open("w") as log:
        worker = Worker("subquad.runs.worker:why_ended", log)
        worker.wait()
    assert not (tmp_path / "executed").exists()
