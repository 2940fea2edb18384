"""Part `kills`: a run that is interrupted at any moment, and resumed, loses nothing.

A case is one run of `compare`, `train` or `convert`, interrupted a few times and then left to finish. An interruption is a
signal, a full disk or a folder that became read-only, at a random moment. After each of them every file must be readable, every
finished cell must still be there, and the command must have ended in silence or with one message. In the end the results, the
weights and the names of all files must be those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from subquad import bench, training
from subquad.bench import Plan as ComparisonPlan
from subquad.bench import Setting
from subquad.conversion.plan import LoraOptions, LowRankOptions, Repair, Source, StageOptions, Swap, Text
from subquad.conversion.plan import Plan as ConversionPlan
from subquad.conversion.results import load as load_conversion
from subquad.conversion.run import run as run_conversion
from subquad.errors import SubquadError
from subquad.runs import checkpoints
from subquad.tasks import TASKS

SAVED = Path(__file__).parents[1] / "saved"  # a small model and a text
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
FULL, READ_ONLY = "full disk", "read-only folder"
SHARES = {"SIGKILL": 60, "SIGTERM": 12, "SIGINT": 12, FULL: 8, READ_ONLY: 8}
INTERRUPTIONS = 8  # of one run
DISK = 32 * 2**20  # bytes of the small file system that gets full
LIBRARIES = ("accelerate", "peft", "sklearn.datasets", "transformers.trainer")  # which the commands import late
PATIENCE = 120.0  # seconds for a command to end
STOPPED = 130  # exit code after Ctrl-C


class Lost(Exception):
    """What an interruption must not do has happened."""


class Command(ABC):
    """A run that can be interrupted: how to start it, and what it has made so far."""

    @abstractmethod
    def run(self, out: Path, reached: Callable[[int], None]) -> None:
        """Start or resume it in `out`, and call `reached` with a number of pieces of work that are saved by then."""

    @abstractmethod
    def saved(self, out: Path) -> int:
        """How many pieces of work the folder holds: comparable with those that were `reached`."""

    @abstractmethod
    def cells(self, out: Path) -> dict[str, Any]:
        """What is finished. A later one has the same, and maybe more; of a list, the same beginning."""

    @abstractmethod
    def result(self, out: Path) -> Any:
        """What must equal that of an undisturbed run."""


class Compare(Command):
    """Times differ from run to run: what must be equal is which cells were measured."""

    def run(self, out: Path, reached: Callable[[int], None]) -> None:
        rounds = 0
        is_timed = False

        def on_progress(progress: Any) -> None:
            nonlocal rounds, is_timed
            rounds += is_timed  # the next message comes after the measurement was saved
            is_timed = progress.message.endswith(("forward", "training", "decode"))
            reached(rounds)

        plan = ComparisonPlan(("linear", "local"), (32, 64), rounds=2, budget=PATIENCE)
        bench.compare(plan, Setting(heads=2, head_dim=16, threads=1), out, on_progress=on_progress)

    def saved(self, out: Path) -> int:
        return sum(len(t.rounds) for t in self._results(out).timings)

    def cells(self, out: Path) -> dict[str, Any]:
        results = self._results(out)
        facts = {f"{f.method} {f.length}": f.errors for f in results.facts if f.status == "measured" and f.errors}
        return {**{f"{t.method} {t.length} {t.kind}": t.rounds for t in results.timings}, **facts}

    def result(self, out: Path) -> Any:
        results = self._results(out)
        return results.finished, {(t.method, t.length, t.kind, t.status, len(t.rounds)) for t in results.timings}

    def _results(self, out: Path) -> Any:
        return bench.load(out / "results.json")


class Train(Command):
    """Two methods on digits, one after the other."""

    SAVE_EVERY = 5

    def __init__(self, in_worker: bool) -> None:
        self.in_worker = in_worker

    def run(self, out: Path, reached: Callable[[int], None]) -> None:
        settings = replace(
            TASKS["digits"].info.defaults, layers=1, dim=16, heads=2, batch=16, steps=30, epochs=None, dropout=0.1
        )
        done: dict[str, int] = {}

        def on_progress(progress: Any) -> None:
            done[progress.record.method] = progress.record.step
            reached(sum(max(0, step - self.SAVE_EVERY) for step in done.values()))

        training.train(
            TASKS["digits"](), ["linear", "local"], settings, out, threads=1, eval_every=6, save_every=self.SAVE_EVERY,
            resume=True, in_worker=self.in_worker, on_progress=on_progress,
        )  # fmt: skip

    def saved(self, out: Path) -> int:
        newest = [checkpoints.latest(out / r.method) for r in self._records(out)]
        return sum(checkpoints.step_of(path) for path in newest if path is not None)

    def cells(self, out: Path) -> dict[str, Any]:
        for record in self._records(out):
            for folder in (checkpoints.latest(out / record.method), out / record.method / checkpoints.BEST):
                if folder is not None and folder.exists():
                    checkpoints.require_intact(folder)
        return {r.method: (r.test, r.losses, r.evals) for r in self._records(out) if r.status == "done"}

    def result(self, out: Path) -> Any:
        names = ("method", "status", "losses", "evals", "best_step", "test", "step")
        return {r.method: [getattr(r, name) for name in names] for r in self._records(out)}, _weights(out)

    def _records(self, out: Path) -> Any:
        return training.load(out / "results.json").records


class Convert(Command):
    """A small Llama: a search for a layer to keep, then all stages of repair."""

    def run(self, out: Path, reached: Callable[[int], None]) -> None:
        stages = Repair(
            transfer=StageOptions(steps=40), align=LowRankOptions(steps=30, rank=2), lora=LoraOptions(steps=30, rank=2)
        )
        plan = ConversionPlan(
            source=Source(model=str(SAVED / "llama")),
            swap=Swap(method="hedgehog", keep=1),
            text=Text(files=(SAVED / "counting.txt",), length=24, batch=2, tokens=480),
            repair=stages,
            threads=1,
        )
        run_conversion(plan, out, resume=True)

    def saved(self, out: Path) -> int:
        return len(self.cells(out))

    def cells(self, out: Path) -> dict[str, Any]:
        results = load_conversion(out / "results.json")
        stages = {name: stage.losses for name, stage in results.stages.items() if stage.ended}
        return {**{f"diagnosis {name}": True for name in results.diagnoses}, **stages}

    def result(self, out: Path) -> Any:
        results = load_conversion(out / "results.json")
        scores = {name: [diagnosis.loss_before, diagnosis.loss_after] for name, diagnosis in results.diagnoses.items()}
        return results.is_saved, scores, {name: stage.losses for name, stage in results.stages.items()}, _weights(out)


COMMANDS: dict[str, tuple[Command, int]] = {  # with how many of a hundred cases
    "train": (Train(in_worker=False), 58),
    "train in a worker": (Train(in_worker=True), 4),
    "convert": (Convert(), 30),
    "compare": (Compare(), 8),
}


def run_case(seed: int, index: int, folder: Path) -> dict[str, Any]:
    """One run with its interruptions."""
    chance = random.Random(f"{seed} {index}")
    names = list(COMMANDS)
    name = chance.choices(names, [COMMANDS[n][1] for n in names])[0]
    events: list[str] = []
    try:
        with _small_disk(folder) as (disk, is_mounted):
            _interrupted_run(name, disk, is_mounted, chance, events)
    except Lost as lost:
        steps = " | ".join(events)
        return {"verdict": "wrong", "labels": [name, *_kinds(events)], "message": f"{name}: {lost}", "reproduction": steps}
    return {"verdict": "answered", "labels": [name, *_kinds(events)]}


def _kinds(events: list[str]) -> list[str]:
    return [event.partition(" at ")[0] for event in events]


def _interrupted_run(name: str, disk: Path, is_mounted: bool, chance: random.Random, events: list[str]) -> None:
    command = COMMANDS[name][0]
    undisturbed, seconds, files = _undisturbed(name)
    out = disk / "out"
    before: dict[str, Any] = {}
    saved = 0
    for _ in range(chance.randint(1, INTERRUPTIONS)):
        kinds = [kind for kind in SHARES if is_mounted or kind != FULL]
        kind = chance.choices(kinds, [SHARES[k] for k in kinds])[0]
        moment, is_writing = chance.uniform(0.0, seconds), chance.random() < 0.3
        events.append(f"{kind} at {moment:.3f} s" + (", while writing" if is_writing else ""))
        session = _Session(command, out)
        has_ended = session.wait(moment) or (is_writing and session.wait_for_writing(0.5))
        with _interruption(kind, session, disk, out):
            code = session.end()
        _wait_for_workers(out)
        _require_silence(kind, code, session.log(), has_ended)
        _require_readable(out)
        if not (out / "results.json").exists():
            if before:
                raise Lost(f"after {events[-1]} results.json is gone")
            continue
        reached = saved + session.reached if isinstance(command, Compare) else session.reached
        saved = command.saved(out)
        if saved < reached:
            raise Lost(f"after {events[-1]} {saved} pieces of work are left, of at least {reached}")
        after = command.cells(out)
        for cell, value in before.items():
            if not _continues(after.get(cell), value):
                raise Lost(f"after {events[-1]} the cell {cell} is {after.get(cell)!r}; it was {value!r}")
        before = after
    session = _Session(command, out)
    if (code := session.end()) != 0:
        raise Lost(f"it cannot be resumed: exit code {code}: {session.log()[-2000:]}")
    _require_readable(out)
    if not _equal(command.result(out), undisturbed):
        raise Lost("the results differ from those of an undisturbed run")
    if (found := _names(out)) != files:
        raise Lost(f"the folder holds other files than that of an undisturbed run: {sorted(found ^ files)}")


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
        session = _Session(command, out)
        if (code := session.end()) != 0:
            raise RuntimeError(f"an undisturbed run of {name} ended with code {code}: {session.log()}")
        return command.result(out), time.monotonic() - start, _names(out)


class _Session:
    """One start of a command, in a forked process: nothing is imported again."""

    def __init__(self, command: Command, out: Path) -> None:
        self._reached = mmap.mmap(-1, 8)
        self._log = tempfile.TemporaryFile("w+")
        self.out = out
        self.pid = os.fork()
        if self.pid == 0:
            self._work(command)

    def _work(self, command: Command) -> None:
        code = 1
        try:
            os.setsid()
            for number in (1, 2):
                os.dup2(self._log.fileno(), number)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            _obey_permissions()
            command.run(self.out, lambda count: self._reached.__setitem__(slice(0, 8), struct.pack("q", count)))
            code = 0
        except KeyboardInterrupt:
            code = STOPPED
        except SubquadError as error:
            print(f"error: {error}", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    @property
    def reached(self) -> int:
        return int(struct.unpack("q", self._reached[:])[0])

    def wait(self, seconds: float) -> bool:
        """Whether it ends within that time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._poll():
                return True
            time.sleep(0.002)
        return False

    def wait_for_writing(self, seconds: float) -> bool:
        """Wait until a file or folder is being written, at most so long; whether it has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not any(_unfinished(self.out)):
            if self._poll():
                return True
        return False

    def end(self) -> int:
        """Wait for its end; the exit code, or minus the signal."""
        if not self.wait(PATIENCE):
            os.killpg(self.pid, signal.SIGKILL)
            raise Lost(f"it did not end within {PATIENCE:.0f} s: {self.log()[-2000:]}")
        return os.waitstatus_to_exitcode(self._status)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def _poll(self) -> bool:
        if not hasattr(self, "_status"):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = status
        return hasattr(self, "_status")


@contextlib.contextmanager
def _interruption(kind: str, session: _Session, disk: Path, out: Path) -> Iterator[None]:
    """Interrupt it; inside the block it is left to end."""
    if kind in SIGNALS:
        with contextlib.suppress(ProcessLookupError):
            os.kill(session.pid, SIGNALS[kind])
        yield
    elif kind == FULL:
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        yield
        filler.unlink()
    else:
        folders = [path for path in (out, *out.rglob("*")) if path.is_dir()] if out.exists() else [disk]
        _set_modes(folders, 0o555)
        yield
        _set_modes(folders, 0o755)


def _wait_for_workers(out: Path) -> None:
    """Wait until the workers of a killed process have ended, too: until then they hold the lock of the folder."""
    if (out / ".lock").exists():
        with (out / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)


def _set_modes(folders: list[Path], mode: int) -> None:
    for path in folders:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            path.chmod(mode)


def _require_silence(kind: str, code: int, log: str, has_ended: bool) -> None:
    """Refuse a traceback, and an exit code that does not tell what happened."""
    if "Traceback" in log:
        raise Lost(f"a traceback after {kind}: {log[-3000:]}")
    if has_ended:
        expected = {0}
    elif kind in SIGNALS:
        expected = {0, STOPPED, -SIGNALS[kind]}
    else:
        expected = {0, 1}
    if code not in expected:
        raise Lost(f"exit code {code} after {kind}: {log[-3000:]}")
    if code == 1 and log.count("error: ") != 1:
        raise Lost(f"not one message after {kind}: {log[-3000:]}")


def _require_readable(out: Path) -> None:
    """Refuse a file that cannot be read, except those that were being written."""
    unfinished = {*_unfinished(out)}
    for path in out.rglob("*"):
        if not path.is_file() or unfinished.intersection((path, *path.parents)):
            continue
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".safetensors":
                load_file(path)
            elif path.suffix == ".pt":
                torch.load(path, weights_only=True)
        except Exception as error:
            raise Lost(f"{path.relative_to(out)} cannot be read: {type(error).__name__}: {error}") from error


def _unfinished(out: Path) -> Iterator[Path]:
    """Files and folders that are being written: hidden, but for the lock."""
    return (path for path in out.rglob(".*") if path.name != ".lock") if out.exists() else iter(())


def _names(out: Path) -> frozenset[str]:
    return frozenset(str(path.relative_to(out)) for path in out.rglob("*"))


def _weights(out: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(out.rglob("*.safetensors")):
        found |= {f"{path.relative_to(out)} {name}": tensor for name, tensor in load_file(path).items()}
    return found


def _equal(a: Any, b: Any) -> bool:
    """Equality to the bit, of tensors in tuples and dictionaries, too."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """An empty folder on a file system of its own, if this process may mount one."""
    disk = Path(tempfile.mkdtemp(dir=folder))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)]
    is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield disk, is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
        shutil.rmtree(disk, ignore_errors=True)


def _obey_permissions() -> None:
    """Make a process of the superuser obey the permissions of files, as everybody else's does."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    override, version_3, drop_from_bounding_set = 1, 0x20080522, 24
    header, sets = (ctypes.c_uint32 * 2)(version_3, 0), (ctypes.c_uint32 * 6)()
    libc.prctl(drop_from_bounding_set, override, 0, 0, 0)  # of processes that it starts, too
    libc.capget(header, sets)
    for i in range(3):  # effective, permitted, inheritable
        sets[i] &= ~(1 << override)
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "the superuser's right to ignore permissions could not be given up")
