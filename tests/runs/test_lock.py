"""The lock of a folder: one writer, and no file of anybody else is touched."""

import os

import pytest

from subquad.runs.lock import exclusive
from subquad.runs.results_file import ResultsError


def test_one_writer_at_a_time(tmp_path):
    for _ in range(2):
        with (
            exclusive(tmp_path, "run"),
            pytest.raises(ResultsError, match="another run is writing to"),
            exclusive(tmp_path, "run"),
        ):
            pass


@pytest.mark.parametrize("content", [b"precious", None])
def test_a_link_is_refused_and_what_it_points_to_is_left_alone(tmp_path, content):
    victim = tmp_path / "victim"
    if content is not None:
        victim.write_bytes(content)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(victim)
    with (
        pytest.raises(ResultsError, match=r"run/\.lock, must be a regular file; got a symbolic link\. Remove it, or choose"),
        exclusive(tmp_path / "run", "run"),
    ):
        pass
    assert (victim.read_bytes() if victim.exists() else None) == content


def test_the_content_of_a_lock_file_is_left_alone(tmp_path):
    (tmp_path / "mine").write_bytes(b"precious")
    os.link(tmp_path / "mine", tmp_path / ".lock")
    with exclusive(tmp_path, "run"):
        pass
    assert (tmp_path / "mine").read_bytes() == b"precious"


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ResultsError, match="must be a regular file; got a device or a pipe"), exclusive(tmp_path, "run"):
        pass


def test_the_descriptor_is_closed(tmp_path):
    with exclusive(tmp_path, "run") as descriptor:
        os.fstat(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_an_error_of_the_file_system_in_the_folder_is_a_clear_one(tmp_path):
    with (
        pytest.raises(
            ResultsError, match=r"gone.txt cannot be read or written: No such file.*permissions .* free space .*resume"
        ),
        exclusive(tmp_path, "run"),
    ):
        (tmp_path / "gone.txt").unlink()


def test_an_error_of_the_file_system_elsewhere_passes_through(tmp_path):
    with pytest.raises(FileNotFoundError), exclusive(tmp_path / "run", "run"):
        (tmp_path / "gone.txt").unlink()
