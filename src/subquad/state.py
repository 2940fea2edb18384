"""Decode states: what a mechanism remembers of the tokens it has seen.

A state is a value. A call takes one and returns another, and the one it took stays as it was. To roll back, continue
from an earlier state, and a refused call changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from subquad.errors import StateError


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
        if recorded or torch.compiler.is_compiling():
            return GrowingTensor(torch.cat([old, new], dim=-2))
        length = self.length + new.shape[-2]
        grown = GrowingTensor.__new__(GrowingTensor)
        grown._buffer = self._buffer if self._buffer.has_room(self.length, length) else _Buffer.copy(old, length)
        grown._buffer.rows.narrow(-2, self.length, new.shape[-2]).copy_(new)
        grown._buffer.filled = grown.length = length
        return grown


@dataclass(eq=False)
class _Buffer:
    rows: Tensor
    filled: int

    def has_room(self, start: int, end: int) -> bool:
        """Whether rows `start` to `end` are free."""
        writable = torch.is_inference_mode_enabled() or not self.rows.is_inference()
        return self.filled == start and end <= self.rows.shape[-2] and writable

    @staticmethod
    def copy(old: Tensor, length: int) -> _Buffer:
        room = old.new_empty(*old.shape[:-2], max(length, 16, length * 3 // 2), old.shape[-1])
        room.narrow(-2, 0, old.shape[-2]).copy_(old)
        return _Buffer(room, old.shape[-2])


StateTensors = dict[str, Tensor | GrowingTensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class State:
    """What one sequence, or a batch of them, leaves behind for the next token.

    Args:
        method: the mechanism with its options, as text; no other mechanism may continue this state.
        kv_heads, head_dim, value_dim, dtype: of the keys and values seen.
        length: tokens seen, pads included.
        tensors: what the mechanism keeps, batch first.
    """

    method: str
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    length: int
    tensors: StateTensors = field(repr=False)

    @property
    def batch(self) -> int:
        return rows(next(iter(self.tensors.values()))).shape[0]

    @property
    def device(self) -> torch.device:
        return rows(next(iter(self.tensors.values()))).device

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

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
        return self._map(lambda tensor: tensor.to(target))

    def reorder(self, index: Tensor) -> State:
        """The batch rows listed in `index` (any length, repeats allowed), as beam search needs."""
        if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64) or index.dim() != 1:
            came = f"{tuple(index.shape)} {index.dtype}" if isinstance(index, Tensor) else repr(index)
            raise StateError(f"reorder takes a 1-D integer tensor of batch rows; got {came}.")
        if index.numel() and not bool((index >= 0).all() & (index < self.batch).all()):
            raise StateError(
                f"reorder takes rows 0 to {self.batch - 1}, since the state has batch size {self.batch}; got {index.tolist()}."
            )
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: `torch.save` writes it, `torch.load(..., weights_only=True)` reads it."""
        tensors = {name: rows(tensor).clone() for name, tensor in self.tensors.items()}
        return {**{name: getattr(self, name) for name in _PLAIN}, "tensors": tensors}

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any]) -> State:
        """The state that `state_dict` wrote."""
        if isinstance(saved, Mapping) and "parts" in saved:  # what older versions called the tensors
            saved = {("tensors" if name == "parts" else name): value for name, value in saved.items()}
        tensors = saved.get("tensors") if isinstance(saved, Mapping) else None
        is_whole = isinstance(tensors, Mapping) and tensors and all(isinstance(t, Tensor) for t in tensors.values())
        if not is_whole or set(saved) != {*_PLAIN, "tensors"}:
            came = ", ".join(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
            raise StateError(
                f"a saved state has the entries {', '.join(_PLAIN)} and tensors; got {came}. "
                "Pass what State.state_dict() returned."
            )
        return cls(**{**saved, "tensors": dict(saved["tensors"])})

    def _map(self, change: Callable[[Tensor], Tensor]) -> State:
        changed = {
            name: change(tensor) if isinstance(tensor, Tensor) else GrowingTensor(change(tensor.rows))
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=changed)


_PLAIN = ("method", "kv_heads", "head_dim", "value_dim", "dtype", "length")


def rows(tensor: Tensor | GrowingTensor) -> Tensor:
    """What a state holds under one name, as a plain tensor."""
    return tensor if isinstance(tensor, Tensor) else tensor.rows
