"""Part `kills`: a run that is interrupted at any moment and then resumed loses nothing.

A case is one run of `compare`, `train` or `convert` that is interrupted a few times and then left to finish. An interruption is
a signal, a full disk or a folder that becomes read-only, at a random moment. After each one, every file must be readable, every
finished cell must still be there, and the command must have ended without a traceback and with at most one error message. In
the end, the results, the weights and the names of all files must equal those of an uninterrupted run.
"""

from __future__ import annotations

import importlib
import json
import random
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.soak.commands import COMMANDS, Compare
from tests.soak.interruptions import (
    FULL,
    READ_ONLY,
    SIGNALS,
    STOPPED,
    Session,
    interruption,
    small_disk,
    unfinished,
    wait_for_workers,
)

COUNT = 560  # about 1,050 interruptions
SECONDS = 1200
SHARES = {"SIGKILL": 60, "SIGTERM": 12, "SIGINT": 12, FULL: 8, READ_ONLY: 8}
INTERRUPTIONS = 8  # of one run, at most
LIBRARIES = ("accelerate", "peft", "sklearn.datasets", "transformers.trainer")  # which the commands import late


class InterruptionError(Exception):
    """An interruption had an effect that it must not have."""


def run_case(seed: int, index: int, folder: Path) -> dict[str, Any]:
    """One run with its interruptions; the labels list those that came before the run ended."""
    chance = random.Random(f"{seed} {index}")
    name = chance.choices(list(COMMANDS), [share for _, share in COMMANDS.values()])[0]
    interruptions: list[str] = []
    labels = {"command": name, "interruption": interruptions}
    try:
        with small_disk(folder) as (disk, is_mounted):
            _InterruptedRun(name, disk, is_mounted, chance, interruptions).run()
    except (InterruptionError, TimeoutError) as error:
        how = f"interrupted by {', '.join(interruptions)}: python -m tests.soak --part kills --seed {seed} --only {index}"
        return {"verdict": "wrong", "labels": labels, "error": f"{name}: {error}", "reproduction": how}
    return {"verdict": "answered", "labels": labels}


class _InterruptedRun:
    """A run, and what it is known to have saved so far."""

    def __init__(self, name: str, disk: Path, is_mounted: bool, chance: random.Random, interruptions: list[str]) -> None:
        self.command, _ = COMMANDS[name]
        self.uninterrupted, self.seconds, self.files = _uninterrupted(name)
        self.disk, self.out, self.chance, self.interruptions = disk, disk / "out", chance, interruptions
        self.kinds = {kind: share for kind, share in SHARES.items() if is_mounted or kind != FULL}
        self.saved, self.cells = 0, dict[str, Any]()

    def run(self) -> None:
        for _ in range(self.chance.randint(1, INTERRUPTIONS)):
            kind = self.chance.choices(list(self.kinds), list(self.kinds.values()))[0]
            moment, is_writing = self.seconds * self.chance.random() ** 2, self.chance.random() < 0.3  # more often early
            session = Session(self.command, self.out)
            if session.wait(moment) or (is_writing and session.wait_for_writing(0.5)):
                break
            with interruption(kind, session, self.disk):
                code = session.end()
            self.interruptions.append(kind)
            wait_for_workers(self.out)
            _require_clean_end(kind, code, session.log())
            _require_readable(self.out)
            self._require_kept(kind, session.reached)
        self._finish()

    def _require_kept(self, kind: str, reached: int) -> None:
        """Raise an error if anything that was saved is lost."""
        if not (self.out / "results.json").exists():
            if self.cells:
                raise InterruptionError(f"after {kind}, results.json is gone")
            return
        reached += self.saved if isinstance(self.command, Compare) else 0
        self.saved = self.command.saved(self.out)
        if self.saved < reached:
            raise InterruptionError(f"after {kind}, {self.saved} pieces of work are left; at least {reached} had been saved")
        cells = self.command.cells(self.out)
        for cell, value in self.cells.items():
            if not _continues(cells.get(cell), value):
                raise InterruptionError(f"after {kind}, the cell {cell} is {cells.get(cell)!r}; it was {value!r} before")
        self.cells = cells

    def _finish(self) -> None:
        """Resume the run until it finishes; the outcome must be that of an uninterrupted run."""
        session = Session(self.command, self.out)
        if (code := session.end()) != 0:
            raise InterruptionError(f"the run could not be resumed: exit code {code}: {session.log()[-2000:]}")
        _require_readable(self.out)
        if not _equal(self.command.result(self.out), self.uninterrupted):
            raise InterruptionError("the results differ from those of an uninterrupted run")
        if (found := _names(self.out)) != self.files:
            raise InterruptionError(
                f"the files are not those of an uninterrupted run; the difference is {sorted(found ^ self.files)}"
            )


def _continues(after: Any, before: Any) -> bool:
    """Whether both are equal; a list may have grown at its end."""
    return after[: len(before)] == before if isinstance(before, list) and isinstance(after, list) else after == before


@cache
def _uninterrupted(name: str) -> tuple[Any, float, frozenset[str]]:
    """The result of an uninterrupted run, how many seconds it takes, and the files that it leaves."""
    command = COMMANDS[name][0]
    for library in LIBRARIES:  # here, so that forked processes need not
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        start = time.monotonic()
        session = Session(command, out)
        if (code := session.end()) != 0:
            raise RuntimeError(f"an uninterrupted run of {name} ended with exit code {code}: {session.log()}")
        return command.result(out), time.monotonic() - start, _names(out)


def _require_clean_end(kind: str, code: int, log: str) -> None:
    """Raise an error for a traceback, an unexpected exit code, or a failure without exactly one error message."""
    if "Traceback" in log:
        raise InterruptionError(f"traceback after {kind}: {log[-3000:]}")
    expected = {0, STOPPED, -SIGNALS[kind]} if kind in SIGNALS else {0, 1}
    if code not in expected:
        raise InterruptionError(f"unexpected exit code {code} after {kind}: {log[-3000:]}")
    if code == 1 and sum(line.startswith("error: ") for line in log.splitlines()) != 1:
        raise InterruptionError(f"expected exactly one error message after {kind}: {log[-3000:]}")


def _require_readable(out: Path) -> None:
    """Raise an error for a file that cannot be read, unless it was being written."""
    being_written = {*unfinished(out)}
    for path in out.rglob("*"):
        if not path.is_file() or being_written.intersection((path, *path.parents)):
            continue
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".safetensors":
                load_file(path)
            elif path.suffix == ".pt":
                torch.load(path, weights_only=True)
        except Exception as error:
            raise InterruptionError(f"{path.relative_to(out)} cannot be read: {type(error).__name__}: {error}") from error


def _names(out: Path) -> frozenset[str]:
    return frozenset(str(path.relative_to(out)) for path in out.rglob("*"))


def _equal(a: Any, b: Any) -> bool:
    """Bit-for-bit equality, also of tensors in tuples and dictionaries."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)
