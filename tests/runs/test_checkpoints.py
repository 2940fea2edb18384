"""Which folders are checkpoints, and whether their files are those that were written."""

import os

import pytest

from subquad.runs import checkpoints


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "linear" / "checkpoint-7"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"weights")
    checkpoints.write_checksums(folder)
    return folder


@pytest.mark.parametrize(
    "name", ["checkpoint-²", "checkpoint-٣", "checkpoint-mine", "checkpoint-", f"checkpoint-{'9' * 5000}"[:250]]
)
def test_other_folders_are_no_checkpoints_and_stay(checkpoint, name):
    other = checkpoint.parent / name
    other.mkdir()
    (checkpoint.parent / "checkpoint-9").write_bytes(b"a file")
    assert checkpoints.latest(checkpoint.parent) == checkpoint
    checkpoints.clean_up(checkpoint.parent)
    checkpoints.remove_all(checkpoint.parent)
    assert other.exists()
    assert not checkpoint.exists()


def test_what_was_written_is_intact_with_hidden_files_beside_it(checkpoint):
    (checkpoint / ".DS_Store").write_bytes(b"")
    checkpoints.require_intact(checkpoint)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{}", "contents.json, weights"),
        ("[]", "contents.json"),
        ('{"weights": "7"}', "contents.json"),
        ('{"weights": NaN}', "contents.json"),
        ('{"weights": 1}', "weights"),
        ('{"weights": 1, "../other": 2}', "weights, ../other"),
        ("[" * 100_000, "contents.json"),
        ("\udcff", "contents.json"),
    ],
)
def test_a_list_of_files_that_says_something_else_is_refused(checkpoint, content, named):
    (checkpoint / "contents.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(checkpoints.DamagedError, match=rf"these are missing or have changed: {named}\. Put them back, or"):
        checkpoints.require_intact(checkpoint)


def test_an_empty_folder_with_an_empty_list_is_refused(tmp_path):
    (tmp_path / "contents.json").write_text("{}")
    with pytest.raises(checkpoints.DamagedError, match=r"have changed: contents\.json\. Put"):
        checkpoints.require_intact(tmp_path)


def test_a_file_that_the_run_did_not_write_is_refused(checkpoint):
    (checkpoint / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(checkpoints.DamagedError, match=r"have changed: pytorch_model\.bin\. Put"):
        checkpoints.require_intact(checkpoint)


def test_a_checkpoint_file_that_cannot_be_written_is_refused_and_the_old_one_stays(tmp_path, monkeypatch):
    path = tmp_path / "repair" / "lora.pt"
    checkpoints.write_file(path, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(checkpoints.SaveError, match=r"lora.pt could not be written: .*No space left.*MiB are free.*--resume"):
        checkpoints.write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [found.name for found in path.parent.iterdir()] == ["lora.pt"]


def test_nothing_but_the_folder_is_left_of_writing_it(tmp_path):
    checkpoints.write_folder(tmp_path / "best", lambda folder: (folder / "config.json").write_text("{}"))
    assert [found.name for found in tmp_path.iterdir()] == ["best"]


def test_the_log_follows_no_link(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "linear"
    victim.write_text("precious")
    folder.mkdir()
    (folder / checkpoints.LOG).symlink_to(victim)
    with pytest.raises(checkpoints.SaveError, match=r"linear/log\.txt, cannot be written: it is a symbolic link\. Remove it"):
        checkpoints.open_log(folder)
    (folder / checkpoints.LOG).unlink()
    for line in ("one\n", "two\n"):
        with checkpoints.open_log(folder) as log:
            log.write(line)
    assert (folder / checkpoints.LOG).read_text() == "one\ntwo\n"
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("cleans_up", [True, False])
def test_folders_are_filled_where_they_belong(tmp_path, cleans_up):
    """A link in the place of the staging folder would lead to somebody else's models."""
    victim, folder = tmp_path / "victim", tmp_path / "linear"
    for path in (victim / "best", folder):
        path.mkdir(parents=True)
    (victim / "best" / "weights").write_text("precious")
    (folder / checkpoints.STAGING).symlink_to(victim)
    if cleans_up:
        checkpoints.clean_up(folder)
    checkpoints.write_folder(folder / "best", lambda path: (path / "weights").write_text("new"))
    assert (victim / "best" / "weights").read_text() == "precious"
    assert (folder / "best" / "weights").read_text() == "new"
