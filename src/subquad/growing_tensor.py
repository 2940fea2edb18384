"""A tensor that grows by rows, for decode states that keep single tokens."""

from __future__ import annotations

import torch
from torch import Tensor


class GrowingTensor:
    """A tensor that grows along dimension -2 in place, in a buffer with room to spare.

    All states that are prefixes of the longest one share the buffer. Appending to a shorter prefix would overwrite rows that
    the longer one reads, so it copies the prefix to a new buffer first.
    """

    def __init__(self, rows: Tensor) -> None:
        self._buffer = _Buffer(rows, rows.shape[-2])
        self.length = rows.shape[-2]

    @property
    def rows(self) -> Tensor:
        return self._buffer.rows.narrow(-2, 0, self.length)

    @property
    def nbytes(self) -> int:
        return self._buffer.rows.nbytes

    def append(self, new: Tensor, *, recorded: bool) -> GrowingTensor:
        """These rows and `new`. If autograd has `recorded` the rows it may have saved them, so nothing is written in place."""
        old = self.rows
        if recorded or torch.compiler.is_compiling() or (torch.is_grad_enabled() and old.requires_grad):
            return GrowingTensor(torch.cat([old, new], dim=-2))
        if not new.shape[-2]:
            return self  # a write of no rows would still count as one, in a buffer that may be a view of a caller's tensor
        length = self.length + new.shape[-2]
        grown = GrowingTensor.__new__(GrowingTensor)
        grown._buffer = self._buffer if self._buffer.claim(self.length, length) else _Buffer.copy(old, length)
        grown._buffer.rows.narrow(-2, self.length, new.shape[-2]).copy_(new)
        grown.length = length
        return grown

    def extended(self) -> GrowingTensor:
        """These rows and one more, not initialised, for a caller who writes it at once; autograd must not be recording."""
        grown = GrowingTensor.__new__(GrowingTensor)
        grown.length = self.length + 1
        fits = self._buffer.claim(self.length, grown.length)
        grown._buffer = self._buffer if fits else _Buffer.copy(self.rows, grown.length)
        return grown

    @property
    def buffer(self) -> Tensor:
        """The rows, and the room for more behind them."""
        return self._buffer.rows


class _Buffer:
    """Rows, of which the first are in use."""

    def __init__(self, rows: Tensor, used: int) -> None:
        self.rows = rows
        self._free = [used]  # the first free row; empty while a thread claims rows

    def claim(self, start: int, end: int) -> bool:
        """Take the rows `start` to `end`, if they are free; of several threads that try, one gets them."""
        if end > self.rows.shape[-2] or (self.rows.is_inference() and not torch.is_inference_mode_enabled()):
            return False
        try:
            free = self._free.pop()  # atomic, and unlike a lock never left behind in a forked process
        except IndexError:
            return False
        self._free.append(end if free == start else free)
        return free == start

    @staticmethod
    def copy(old: Tensor, length: int) -> _Buffer:
        """The rows `old`, with room for `length` and more, all of which is claimed."""
        room = old.new_empty(*old.shape[:-2], max(length, 16, length * 3 // 2), old.shape[-1])
        room.narrow(-2, 0, old.shape[-2]).copy_(old)
        return _Buffer(room, length)
