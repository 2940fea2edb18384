"""Ctrl-C and SIGTERM as a request to stop, which a run grants after its current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Inside its `with` block the first signal sets `requested` and calls `on_request`; the second one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self.on_request: Callable[[], object] = lambda: None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def keep_handlers(self) -> None:
        """Keep catching signals after the block: a launcher ends all processes when one is lost, before it can report why."""
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self.on_request()
