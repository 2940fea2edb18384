"""Decode states: what a mechanism remembers of the tokens it has seen.

A state is a value. A call takes one and returns another; the one it took stays as it was. So rolling back is
going on from an earlier state, and a refused call changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from subquad.errors import StateError


class Growing:
    """Rows along dimension -2 that take more rows in place, with room to spare.

    Every state that is a prefix of the longest one shares the buffer. Appending to a shorter prefix would
    overwrite rows that a longer one reads, so it moves to a buffer of its own.
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

    def append(self, new: Tensor, *, recorded: bool) -> Growing:
        """These rows and `new`. Where a graph is `recorded`, it may have saved them: then nothing is written in place."""
        old = self.rows
        if recorded or torch.compiler.is_compiling():
            return Growing(torch.cat([old, new], dim=-2))
        length = self.length + new.shape[-2]
        grown = Growing.__new__(Growing)
        grown._buffer = self._buffer if self._buffer.takes(self.length, length) else _Buffer.copy(old, length)
        grown._buffer.rows.narrow(-2, self.length, new.shape[-2]).copy_(new)
        grown._buffer.filled = grown.length = length
        return grown


@dataclass(eq=False)
class _Buffer:
    rows: Tensor
    filled: int

    def takes(self, start: int, end: int) -> bool:
        writable = torch.is_inference_mode_enabled() or not self.rows.is_inference()
        return self.filled == start and end <= self.rows.shape[-2] and writable

    @staticmethod
    def copy(old: Tensor, length: int) -> _Buffer:
        room = old.new_empty(*old.shape[:-2], max(length, 16, length * 3 // 2), old.shape[-1])
        room.narrow(-2, 0, old.shape[-2]).copy_(old)
        return _Buffer(room, old.shape[-2])


Parts = dict[str, Tensor | Growing]


@dataclass(frozen=True, eq=False, kw_only=True)
class State:
    """What one sequence, or a batch of them, leaves behind for the next token.

    Args:
        method: the mechanism with its options, as text; another one may not continue this state.
        kv_heads, head_dim, value_dim, dtype: of the keys and values seen.
        length: tokens seen, pads included.
        parts: the tensors, batch first.
    """

    method: str
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    length: int
    parts: Parts = field(repr=False)

    @property
    def batch(self) -> int:
        return _rows(next(iter(self.parts.values()))).shape[0]

    @property
    def device(self) -> torch.device:
        return _rows(next(iter(self.parts.values()))).device

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self.parts.values())

    def clone(self) -> State:
        """A copy that shares no memory with this state."""
        return self._map(Tensor.clone)

    def detach(self) -> State:
        """This state without the graph that computed it."""
        return self._map(Tensor.detach)

    def to(self, device: torch.device | str) -> State:
        """This state on another device."""
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise StateError(f"a state moves to a device such as 'cpu' or 'cuda:0'; got {device!r}.") from error
        return self._map(lambda part: part.to(target))

    def reorder(self, index: Tensor) -> State:
        """The batch rows named by `index` (any length, repeats allowed), as beam search needs."""
        if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64) or index.dim() != 1:
            came = f"{tuple(index.shape)} {index.dtype}" if isinstance(index, Tensor) else repr(index)
            raise StateError(f"reorder takes a tensor, 1-D and integer, that names batch rows; got {came}.")
        if index.numel() and not bool((index >= 0).all() & (index < self.batch).all()):
            raise StateError(
                f"reorder takes rows 0 to {self.batch - 1}, since the state has batch {self.batch}; got {index.tolist()}."
            )
        return self._map(lambda part: part.index_select(0, index.to(part.device)))

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: `torch.save` writes it, `torch.load(..., weights_only=True)` reads it."""
        parts = {name: _rows(part).clone() for name, part in self.parts.items()}
        return {**{name: getattr(self, name) for name in _PLAIN}, "parts": parts}

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any]) -> State:
        """The state that `state_dict` wrote."""
        parts = saved.get("parts") if isinstance(saved, Mapping) else None
        whole = isinstance(parts, Mapping) and parts and all(isinstance(part, Tensor) for part in parts.values())
        if not whole or set(saved) != {*_PLAIN, "parts"}:
            came = ", ".join(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
            raise StateError(
                f"a saved state has the entries {', '.join(_PLAIN)}, and its tensors as parts; got {came}. "
                "Pass what State.state_dict() returned."
            )
        return cls(**{**saved, "parts": dict(saved["parts"])})

    def _map(self, change: Callable[[Tensor], Tensor]) -> State:
        changed = {
            name: change(part) if isinstance(part, Tensor) else Growing(change(part.rows)) for name, part in self.parts.items()
        }
        return replace(self, parts=changed)


_PLAIN = ("method", "kv_heads", "head_dim", "value_dim", "dtype", "length")


def _rows(part: Tensor | Growing) -> Tensor:
    return part if isinstance(part, Tensor) else part.rows
