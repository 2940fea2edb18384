"""Checkpoint folders, written atomically: checkpoints to resume from, and the best model so far.

A folder is filled under another name, flushed to the disk and renamed; what it replaces is removed only after that. Beside its
files are their checksums, so that a run refuses to resume from a folder that was changed.

    OUT/METHOD/checkpoint-120   the newest, to resume from
    OUT/METHOD/best             the best model, as `save_pretrained` writes it
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from subquad.errors import SubquadError
from subquad.runs.files import write_atomically

PREFIX = "checkpoint-"
BEST = "best"
LOG = "log.txt"  # what the worker process and its libraries print
STAGING = ".writing"  # folders that are being filled
CHECKSUMS = "contents.json"  # in each folder: the checksums of its other files
_OLD = ".old"
_BLOCK = 2**20  # bytes read at a time


class SaveError(SubquadError, OSError):
    """A model or checkpoint that could not be written."""


class DamagedError(SubquadError):
    """A checkpoint or model whose files are not those that were written."""


def latest(folder: Path) -> Path | None:
    """The newest checkpoint in `folder`."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdigit()]
    return max(found, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name[len(PREFIX) :])


def has_any(folder: Path) -> bool:
    """Whether `folder` has a checkpoint or a best model."""
    return latest(folder) is not None or (folder / BEST).exists()


def write_checksums(folder: Path) -> None:
    write_atomically(folder / CHECKSUMS, json.dumps(_checksums(folder)).encode())


def require_intact(folder: Path) -> None:
    """Refuse a checkpoint or best model in which a file is missing or has changed since its checksum was written."""
    found = _checksums(folder)
    try:
        expected = dict(json.loads((folder / CHECKSUMS).read_text()))
    except (OSError, TypeError, ValueError):
        expected = {CHECKSUMS: None}
    wrong = [name for name in expected if name not in found or found[name] != expected[name]]
    if wrong:
        raise DamagedError(
            f"a run resumes only from files that it wrote; in {folder} these are missing or have changed: "
            f"{', '.join(wrong)}. Put them back, or remove {folder.parent} to start that method over."
        )


def _checksums(folder: Path) -> dict[str, int]:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    return {str(path.relative_to(folder)): _checksum(path) for path in found}


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total


def clean_up(folder: Path) -> None:
    """After a kill: remove what is half written, and finish a replacement that was interrupted between its two renames."""
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
    for path in [*folder.glob(f"{PREFIX}*"), folder / BEST, folder / STAGING, folder / _OLD]:
        shutil.rmtree(path, ignore_errors=True)
    (folder / LOG).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def write_folder(
    target: Path, fill: Callable[[Path], object], is_writer: bool = True, wait_for_all: Callable[[], None] = lambda: None
) -> None:
    """Let `fill` write into a new folder, then put that in the place of `target`.

    With several processes all of them fill; `wait_for_all` is their barrier, and the one that `is_writer` renames.
    """
    unfinished = target.parent / STAGING / target.name
    try:
        if is_writer:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        wait_for_all()
        fill(unfinished)
        wait_for_all()
        if is_writer:
            write_checksums(unfinished)
            _flush_all(unfinished)
            _replace(unfinished, target)
    except Exception as error:  # safetensors and torch raise errors of their own for a full disk
        if is_writer:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise SaveError(_message(error, target)) from error
    if is_writer and target.name.startswith(PREFIX):
        _remove_older(target)


def _replace(unfinished: Path, target: Path) -> None:
    old = target.parent / _OLD
    if target.exists():
        os.rename(target, old)
    os.rename(unfinished, target)
    _flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove_older(newest: Path) -> None:
    for path in newest.parent.glob(f"{PREFIX}*"):
        if path != newest:
            shutil.rmtree(path, ignore_errors=True)


def _flush_all(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def _flush(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _message(error: Exception, target: Path) -> str:
    newest = latest(target.parent)
    kept = "there is no checkpoint yet" if newest is None else f"the checkpoint of step {step_of(newest)} is intact"
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    free = f"{shutil.disk_usage(target.parent).free / 2**20:,.0f} MiB are free there"
    return (
        f"{target} could not be written: {reason} ({free}). Nothing else was lost: {kept}. "
        "Make room, then run the same command with --resume."
    )
