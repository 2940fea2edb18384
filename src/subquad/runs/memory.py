"""The memory that a training holds at its peak, beyond what the process held before there was a model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """Counts from when it is made. On the CPU that is resident memory of the process, so it takes a process a method."""

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
        """While something goes on that is not training."""
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
            with contextlib.suppress(OSError):  # not a Linux: then the highest of all times counts
                _RESET.write_text("5")

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else _resident("VmRSS")

    def _highest(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _resident("VmHWM")


def _resident(name: str) -> int:
    """VmRSS, the resident bytes, or VmHWM, the most there were."""
    if _STATUS.exists():
        return next(1024 * int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(name))
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used
