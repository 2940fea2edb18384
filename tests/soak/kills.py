"""Part `kills`: a run that is interrupted at any moment, and resumed, loses nothing.

A case is one run of `compare`, `train` or `convert`, interrupted a few times and then left to finish. An interruption is a
signal, a full disk or a folder that became read-only, at a random moment. After each of them every file must be readable, every
finished cell must still be there, and the command must have ended in silence or with one message. In the end the results, the
weights and the names of all files must be those of an undisturbed run.
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


class LostError(Exception):
    """An interruption has done what it must not do."""


def run_case(seed: int, index: int, folder: Path) -> dict[str, Any]:
    """One run with its interruptions; the labels count those that came before its end."""
    chance = random.Random(f"{seed} {index}")
    name = chance.choices(list(COMMANDS), [share for _, share in COMMANDS.values()])[0]
    interruptions: list[str] = []
    labels = {"command": name, "interruption": interruptions}
    try:
        with small_disk(folder) as (disk, is_mounted):
            _InterruptedRun(name, disk, is_mounted, chance, interruptions).run()
    except (LostError, TimeoutError) as error:
        how = f"interrupted by {', '.join(interruptions)}: python -m tests.soak --part kills --seed {seed} --only {index}"
        return {"verdict": "wrong", "labels": labels, "error": f"{name}: {error}", "reproduction": how}
    return {"verdict": "answered", "labels": labels}


class _InterruptedRun:
    """A run, and what it is known to have saved so far."""

    def __init__(self, name: str, disk: Path, is_mounted: bool, chance: random.Random, interruptions: list[str]) -> None:
        self.command, _ = COMMANDS[name]
        self.undisturbed, self.seconds, self.files = _undisturbed(name)
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
            _require_silence(kind, code, session.log())
            _require_readable(self.out)
            self._require_kept(kind, session.reached)
        self._finish()

    def _require_kept(self, kind: str, reached: int) -> None:
        """Refuse the loss of anything that was saved."""
        if not (self.out / "results.json").exists():
            if self.cells:
                raise LostError(f"after {kind} results.json is gone")
            return
        reached += self.saved if isinstance(self.command, Compare) else 0
        self.saved = self.command.saved(self.out)
        if self.saved < reached:
            raise LostError(f"after {kind} {self.saved} pieces of work are left, of at least {reached}")
        cells = self.command.cells(self.out)
        for cell, value in self.cells.items():
            if not _continues(cells.get(cell), value):
                raise LostError(f"after {kind} the cell {cell} is {cells.get(cell)!r}; it was {value!r}")
        self.cells = cells

    def _finish(self) -> None:
        """Resume it to its end, which must be that of an undisturbed run."""
        session = Session(self.command, self.out)
        if (code := session.end()) != 0:
            raise LostError(f"it cannot be resumed: exit code {code}: {session.log()[-2000:]}")
        _require_readable(self.out)
        if not _equal(self.command.result(self.out), self.undisturbed):
            raise LostError("the results differ from those of an undisturbed run")
        if (found := _names(self.out)) != self.files:
            raise LostError(f"the folder has other files than that of an undisturbed run: {sorted(found ^ self.files)}")


def _continues(after: Any, before: Any) -> bool:
    """The same; of a list, at least the same beginning."""
    return after[: len(before)] == before if isinstance(before, list) and isinstance(after, list) else after == before


@cache
def _undisturbed(name: str) -> tuple[Any, float, frozenset[str]]:
    """The result of an undisturbed run, its seconds, and the files that it leaves."""
    command = COMMANDS[name][0]
    for library in LIBRARIES:  # once, so that forked processes need not
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        start = time.monotonic()
        session = Session(command, out)
        if (code := session.end()) != 0:
            raise RuntimeError(f"an undisturbed run of {name} ended with code {code}: {session.log()}")
        return command.result(out), time.monotonic() - start, _names(out)


def _require_silence(kind: str, code: int, log: str) -> None:
    """Refuse a traceback, an exit code that does not say what happened, and more or less than one message for an error."""
    if "Traceback" in log:
        raise LostError(f"a traceback after {kind}: {log[-3000:]}")
    expected = {0, STOPPED, -SIGNALS[kind]} if kind in SIGNALS else {0, 1}
    if code not in expected:
        raise LostError(f"exit code {code} after {kind}: {log[-3000:]}")
    if code == 1 and sum(line.startswith("error: ") for line in log.splitlines()) != 1:
        raise LostError(f"not one message after {kind}: {log[-3000:]}")


def _require_readable(out: Path) -> None:
    """Refuse a file that cannot be read, except those that were being written."""
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
            raise LostError(f"{path.relative_to(out)} cannot be read: {type(error).__name__}: {error}") from error


def _names(out: Path) -> frozenset[str]:
    return frozenset(str(path.relative_to(out)) for path in out.rglob("*"))


def _equal(a: Any, b: Any) -> bool:
    """Equality to the bit, of tensors in tuples and dictionaries, too."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)
