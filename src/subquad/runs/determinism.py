"""The same bits on every run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def deterministic(threads: int) -> Iterator[None]:
    """Run on `threads` threads, with PyTorch's deterministic algorithms wherever it has one."""
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
