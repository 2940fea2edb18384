"""Checkpoint folders, written atomically: checkpoints to resume from, and the best model so far.

A folder is filled under another name, flushed to the disk and renamed; what it replaces is removed only after that. Beside its
files are their checksums, so that a run refuses to resume from a folder that was changed.

    OUT/METHOD/checkpoint-120   the newest, to resume from
    OUT/METHOD/best             the best model, as `save_pretrained` writes it
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from subquad.errors import SubquadError
from subquad.runs import typed_json
from subquad.runs.files import flush, write_atomically
from subquad.runs.typed_json import MisfitError

PREFIX = "checkpoint-"
BEST = "best"
LOG = "log.txt"  # what the worker process and its libraries print
STAGING = ".writing"  # folders that are being filled
CHECKSUMS = "contents.json"  # in each folder: the checksums of its other files
_OLD = ".old"
_BLOCK = 2**20  # bytes read at a time
_NAME = re.compile(rf"{PREFIX}([0-9]{{1,18}})")
_LISTED = 8  # names in a message, at most


class SaveError(SubquadError, OSError):
    """A model or checkpoint that could not be written."""


class DamagedError(SubquadError):
    """A checkpoint or model whose files are not those that were written."""


def latest(folder: Path) -> Path | None:
    """The newest checkpoint in `folder`."""
    return max(_all(folder), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    found = _NAME.fullmatch(checkpoint.name)
    assert found is not None
    return int(found[1])


def _all(folder: Path) -> list[Path]:
    """The checkpoints in `folder`; whatever else is in it stays untouched."""
    return [path for path in folder.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir()]


def has_any(folder: Path) -> bool:
    """Whether `folder` has a checkpoint or a best model."""
    return latest(folder) is not None or (folder / BEST).exists()


def write_checksums(folder: Path) -> None:
    write_atomically(folder / CHECKSUMS, typed_json.dumps(_checksums(folder)).encode())


def require_intact(folder: Path) -> None:
    """Refuse a checkpoint or best model in which a file is missing, new or changed since the checksums were written."""
    try:
        found = _checksums(folder)
        expected = typed_json.parse(dict[str, int], typed_json.load(folder / CHECKSUMS))
    except (OSError, MisfitError):
        found, expected = {}, {}
    expected = expected or {CHECKSUMS: 0}
    wrong = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    if wrong:
        more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise DamagedError(
            f"a run resumes only from files that it wrote; in {folder} these are missing or have changed: "
            f"{', '.join(wrong[:_LISTED])}{more}. Put them back, or remove {folder.parent} to start that method over."
        )


def _checksums(folder: Path) -> dict[str, int]:
    """Of all files but this list itself and hidden ones, which some systems leave in every folder."""
    found = sorted(path for path in folder.rglob("[!.]*") if path.is_file() and path != folder / CHECKSUMS)
    return {str(path.relative_to(folder)): _checksum(path) for path in found}


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total


def clean_up(folder: Path) -> None:
    """After a kill: remove what is half written, and finish a replacement that was interrupted between its two renames."""
    _remove_link(folder / STAGING)
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    best, old = folder / BEST, folder / _OLD
    if old.exists() and not best.exists():
        os.rename(old, best)
    shutil.rmtree(old, ignore_errors=True)
    newest = latest(folder)
    if newest is not None:
        _remove_older(newest)


def remove_all(folder: Path) -> None:
    """Remove everything that a run leaves in `folder`, and the folder itself if it is then empty."""
    for path in [*_all(folder), folder / BEST, folder / STAGING, folder / _OLD]:
        shutil.rmtree(path, ignore_errors=True)
    (folder / LOG).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def open_log(folder: Path) -> IO[str]:
    """The log in `folder`, to append to. A link is not followed: it would lead to a file of somebody else."""
    path = folder / LOG
    try:
        return open(path, "a", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666))
    except OSError as error:
        why = "it is a symbolic link" if path.is_symlink() else error.strerror or error
        raise SaveError(f"the log of a run, {path}, cannot be written: {why}. Remove it, or choose another folder.") from error


def write_folder(
    target: Path, fill: Callable[[Path], object], is_writer: bool = True, wait_for_all: Callable[[], None] = lambda: None
) -> None:
    """Let `fill` write into a new folder, then put that in the place of `target`.

    With several processes all of them fill; `wait_for_all` is their barrier, and the one that `is_writer` renames.
    """
    unfinished = target.parent / STAGING / target.name
    try:
        if is_writer:
            _remove_link(target.parent / STAGING)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        wait_for_all()
        fill(unfinished)
        wait_for_all()
        if is_writer:
            write_checksums(unfinished)
            _flush_all(unfinished)
            _replace(unfinished, target)
            with contextlib.suppress(OSError):  # another folder may be in it
                unfinished.parent.rmdir()
    except Exception as error:  # safetensors and torch raise errors of their own for a full disk
        if is_writer:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise SaveError(_message(error, target)) from error
    if is_writer and target.name.startswith(PREFIX):
        _remove_older(target)


def write_file(path: Path, content: bytes) -> None:
    """Write one file, and the folder that it is in if need be; for a checkpoint that has no folder of its own."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise SaveError(
            f"{path} could not be written: {_reason(error, path.parent)}. Nothing else was lost: what was there before is "
            "intact. Make room, then run the same command with --resume."
        ) from error


def _remove_link(path: Path) -> None:
    """A link in the place of our own folder would lead to folders of somebody else, which we would remove."""
    if path.is_symlink():
        path.unlink()


def _replace(unfinished: Path, target: Path) -> None:
    old = target.parent / _OLD
    if target.exists():
        os.rename(target, old)
    os.rename(unfinished, target)
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove_older(newest: Path) -> None:
    for path in _all(newest.parent):
        if path != newest:
            shutil.rmtree(path, ignore_errors=True)


def _flush_all(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        flush(path)


def _message(error: Exception, target: Path) -> str:
    newest = latest(target.parent)
    kept = "there is no checkpoint yet" if newest is None else f"the checkpoint of step {step_of(newest)} is intact"
    return (
        f"{target} could not be written: {_reason(error, target.parent)}. Nothing else was lost: {kept}. "
        "Make room, then run the same command with --resume."
    )


def _reason(error: Exception, folder: Path) -> str:
    """What the error says, and how much room there is."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    while not folder.exists():
        folder = folder.parent
    return f"{reason} ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free there)"
