"""The same bits on every run, and no progress bars but our own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def deterministic(threads: int) -> Iterator[None]:
    """So many threads, and the algorithms that give the same bits each time, where there are such."""
    threads_before, was_on = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False  # it takes time
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
        memory.fill_uninitialized_memory = filled


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of transformers."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
