"""Atomic writes: the old file or the new one, on the disk, through a name that nobody can prepare."""

import os
import re
import stat

import pytest

from subquad.runs.files import remove_unfinished, write_atomically


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "results.json"
    path.write_bytes(b"old")
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_content_is_on_the_disk_before_its_name_and_the_name_before_the_return(path, monkeypatch):
    seen = []

    def kind(number):
        return "folder" if stat.S_ISDIR(os.fstat(number).st_mode) else os.readlink(f"/proc/self/fd/{number}")

    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (seen.append(kind(number)), fsync(number)))
    monkeypatch.setattr(os, "replace", lambda *pair: (seen.append("rename"), replace(*pair)))
    write_atomically(path, b"new")
    assert len(seen) == 3
    assert re.fullmatch(rf"{path.parent}/\.results\.json\.[0-9a-f]{{16}}\.unfinished", seen[0])
    assert seen[1:] == ["rename", "folder"]
    assert path.read_bytes() == b"new"


def test_a_link_at_the_name_of_a_temporary_file_is_not_followed(path, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / f".results.json.{os.getpid()}").symlink_to(victim)
    write_atomically(path, b"new")
    assert victim.read_bytes() == b"precious"


def test_a_file_that_is_there_already_is_not_written_to(path, tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda count: "guessed")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / ".results.json.guessed.unfinished").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(path, b"new")
    assert (victim.read_bytes(), path.read_bytes()) == (b"precious", b"old")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_other(path, tmp_path, monkeypatch, failing):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["results.json"]


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path, mask, expected):
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "new", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == expected


def test_a_replaced_file_keeps_its_permissions(path):
    path.chmod(0o640)
    write_atomically(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_what_a_killed_process_left_is_removed_and_nothing_else(path, tmp_path):
    for name in (".results.json.0123456789abcdef.unfinished", ".other.json.0123456789abcdef.unfinished", ".results.json.mine"):
        (tmp_path / name).write_bytes(b"")
    remove_unfinished(path)
    assert names(tmp_path) == [".other.json.0123456789abcdef.unfinished", ".results.json.mine", "results.json"]
