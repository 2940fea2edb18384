"""Memory: what is free, and what a training holds at its peak."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def free_memory() -> float:
    """Bytes available without swapping; infinite if the system does not report them."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024.0
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")


class PeakMemory:
    """The peak since this object was made, beyond what the process held then.

    On the CPU it is the resident memory of the process, so each method needs a process of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_counting = True
        self._most = 0
        self._reset()
        self._base = self._now()

    def bytes(self) -> int:
        if self._is_counting:
            self._most = max(self._most, self._highest() - self._base)
        return self._most

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what happens in this block, such as an evaluation."""
        self.bytes()
        self._is_counting = False
        try:
            yield
        finally:
            self._reset()
            self._is_counting = True

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):  # not Linux: the peak of the whole process counts
                _RESET.write_text("5")

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else _resident("VmRSS")

    def _highest(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _resident("VmHWM")


def _resident(name: str) -> int:
    """Resident bytes: VmRSS now, VmHWM at their peak."""
    if _STATUS.exists():
        return next(1024 * int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(name))
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used
