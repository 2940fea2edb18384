"""Ctrl-C and SIGTERM as a wish to stop, which a run grants after its next step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """While entered, the first signal asks to stop, and `ask` is called; the second one interrupts at once."""

    def __init__(self) -> None:
        self.is_asked = False
        self.ask: Callable[[], object] = lambda: None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._heard) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stay(self) -> None:
        """Go on hearing signals after the exit, for what is still to be said: a launcher ends all when one is lost."""
        self._before.clear()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
        self.ask()
