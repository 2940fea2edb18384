"""Folders that are never half written: checkpoints to go on from, and the best model so far.

A folder is filled under another name, brought to the disk, and renamed. What it replaces goes only after that. It has the
checksums of its files beside them: of one that somebody has changed since, nothing is gone on from.

    OUT/METHOD/checkpoint-120   the newest, to go on from
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
from subquad.runs import files

PREFIX = "checkpoint-"
BEST = "best"
LOG = "log.txt"  # what the process and its libraries say
STAGE = ".writing"
CONTENTS = "contents.json"  # in each: the checksum of its other files
_OLD = ".old"
_PIECE = 2**20  # bytes read at a time


class SaveError(SubquadError, OSError):
    """A model or checkpoint that could not be written."""


class DamagedError(SubquadError):
    """A checkpoint or a model that is not as it was written."""


def latest(folder: Path) -> Path | None:
    """The newest checkpoint below `folder`."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdigit()]
    return max(found, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name[len(PREFIX) :])


def is_used(folder: Path) -> bool:
    """Whether a run has left a model or a checkpoint in `folder`."""
    return latest(folder) is not None or (folder / BEST).exists()


def seal(written: Path) -> None:
    """Write down what is in it."""
    files.write(written / CONTENTS, json.dumps(_sums(written)).encode())


def require_whole(written: Path) -> None:
    """Refuse a checkpoint or a best model in which a file is missing, or not as it was when it was sealed."""
    there = _sums(written)
    try:
        sealed = dict(json.loads((written / CONTENTS).read_text()))
    except (OSError, TypeError, ValueError):
        sealed = {CONTENTS: None}
    misfits = [name for name in sealed if name not in there or there[name] != sealed[name]]
    if misfits:
        raise DamagedError(
            f"a run goes on from what it has written; in {written} these are missing or have changed: "
            f"{', '.join(misfits)}. Put them back, or remove {written.parent} to start that method over."
        )


def _sums(written: Path) -> dict[str, int]:
    found = sorted(path for path in written.rglob("*") if path.is_file() and path.name != CONTENTS)
    return {str(path.relative_to(written)): _sum(path) for path in found}


def _sum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            total = zlib.crc32(piece, total)
    return total


def tidy(folder: Path) -> None:
    """Remove what a kill left unfinished, and finish an exchange that it cut in two."""
    shutil.rmtree(folder / STAGE, ignore_errors=True)
    best, old = folder / BEST, folder / _OLD
    if old.exists() and not best.exists():
        os.rename(old, best)
    shutil.rmtree(old, ignore_errors=True)
    newest = latest(folder)
    if newest is not None:
        _remove_older(newest)


def clear(folder: Path) -> None:
    """Remove all that a run leaves in `folder`, and the folder if nothing else is in it."""
    for path in [*folder.glob(f"{PREFIX}*"), folder / BEST, folder / STAGE, folder / _OLD]:
        shutil.rmtree(path, ignore_errors=True)
    (folder / LOG).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def write(
    target: Path, fill: Callable[[Path], object], is_writer: bool = True, together: Callable[[], None] = lambda: None
) -> None:
    """Let `fill` write into a folder that then stands at `target`, in the place of whatever stood there.

    Every process fills, `together` waits for all of them, and the one that `is_writer` renames.
    """
    unfinished = target.parent / STAGE / target.name
    try:
        if is_writer:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        together()
        fill(unfinished)
        together()
        if is_writer:
            seal(unfinished)
            _sync(unfinished)
            _exchange(unfinished, target)
    except Exception as error:  # writers of tensors make errors of their own of what the disk says
        if is_writer:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise SaveError(_said(error, target)) from error
    if is_writer and target.name.startswith(PREFIX):
        _remove_older(target)


def _exchange(unfinished: Path, target: Path) -> None:
    old = target.parent / _OLD
    if target.exists():
        os.rename(target, old)
    os.rename(unfinished, target)
    _sync_entry(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove_older(newest: Path) -> None:
    for path in newest.parent.glob(f"{PREFIX}*"):
        if path != newest:
            shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync_entry(path)


def _sync_entry(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _said(error: Exception, target: Path) -> str:
    newest = latest(target.parent)
    kept = "there is no checkpoint yet" if newest is None else f"the checkpoint of step {step_of(newest)} is whole"
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"{target} could not be written: {reason} ({_free(target.parent)}). Nothing else was lost: {kept}. "
        "Make room, then run the same command with --resume."
    )


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free there"
