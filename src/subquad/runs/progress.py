"""Progress of a long command, as passed to its progress callback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """What a progress callback gets.

    Args:
        message: what is being done now.
        fraction: how much of it is done, from 0 to 1.
        seconds_left: an estimate; None if there is none yet.
    """

    message: str
    fraction: float
    seconds_left: float | None = None


OnProgress = Callable[[Progress], object]


@contextlib.contextmanager
def no_transformers_bars() -> Iterator[None]:
    """Hide the progress bars of transformers."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
