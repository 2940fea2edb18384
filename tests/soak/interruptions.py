"""Commands in processes of their own, and what interrupts them: a signal, a full disk or a folder that becomes read-only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from subquad.errors import SubquadError
from tests.soak.commands import Command

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
FULL, READ_ONLY = "full disk", "read-only folder"
DISK = 32 * 2**20  # bytes of the small file system that is filled up
PATIENCE = 120.0  # seconds that a command may take to end
STOPPED = 130  # exit code after Ctrl-C


class Session:
    """One launch of a command, in a forked process so that nothing is imported again."""

    def __init__(self, command: Command, out: Path) -> None:
        self._reached = mmap.mmap(-1, 8)
        self._log = os.fdopen(os.memfd_create("log"), "w+b", buffering=0)  # closed with this object
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
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
        """Whether the command ends within that time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._poll():
                return True
            time.sleep(0.002)
        return False

    def wait_for_writing(self, seconds: float) -> bool:
        """Wait until a file or folder is being written, for at most that time. Returns whether the command has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not any(unfinished(self.out)):
            if self._poll():
                return True
        return False

    def end(self) -> int:
        """Wait until the command ends. Returns its exit code, or minus the number of the signal that ended it."""
        if not self.wait(PATIENCE):
            os.kill(self.pid, signal.SIGKILL)
            raise TimeoutError(f"the command did not end within {PATIENCE:.0f} s: {self.log()[-2000:]}")
        return os.waitstatus_to_exitcode(self._status)

    def log(self) -> str:
        return os.pread(self._log.fileno(), 2**20, 0).decode(errors="replace")

    def _poll(self) -> bool:
        if not hasattr(self, "_status"):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = status
        return hasattr(self, "_status")


@contextlib.contextmanager
def interruption(kind: str, session: Session, disk: Path) -> Iterator[None]:
    """Interrupt the session. A full disk or a read-only folder lasts until the end of the block, in which the command ends."""
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
        out = session.out
        folders = [path for path in (out, *out.rglob("*")) if path.is_dir()] if out.exists() else [disk]
        _set_modes(folders, 0o555)
        yield
        _set_modes(folders, 0o755)


def wait_for_workers(out: Path) -> None:
    """Wait until the workers of a killed process have ended, too: until then, they hold the folder's lock."""
    if (out / ".lock").exists():
        with (out / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)


def _set_modes(folders: list[Path], mode: int) -> None:
    for path in folders:
        with contextlib.suppress(FileNotFoundError):  # removed in the meantime
            path.chmod(mode)


def unfinished(out: Path) -> Iterator[Path]:
    """Files and folders that are being written: all hidden ones except the lock."""
    for folder, folders, files in os.walk(out):  # which passes over what disappears in the meantime
        yield from (Path(folder, name) for name in (*folders, *files) if name.startswith(".") and name != ".lock")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """An empty folder, and whether it is on a small file system of its own, which not every process may mount."""
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
    """Make a process of the superuser obey file permissions, as the processes of other users do."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    override, version_3, drop_from_bounding_set = 1, 0x20080522, 24
    header, sets = (ctypes.c_uint32 * 2)(version_3, 0), (ctypes.c_uint32 * 6)()
    libc.prctl(drop_from_bounding_set, override, 0, 0, 0)  # for processes that it starts, too
    libc.capget(header, sets)
    for i in range(3):  # effective, permitted, inheritable
        sets[i] &= ~(1 << override)
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "the superuser's privilege to bypass file permissions could not be dropped")
