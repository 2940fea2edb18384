"""What the tensors of a decode state must be. Each engine describes those that it keeps, and states from outside are checked.

An engine reads the tensors of its states without checking them, and compiled kernels read their memory. So a state that no call
has returned must fit the description before anything reads it: names, shapes, dtypes and, for counts and positions, ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.errors import StateError, shown_text
from subquad.state import REPAIR, State, rows


@dataclass(frozen=True, eq=False)
class Rows:
    """A number of rows from `least` to `most`, the same in all tensors that have this object in their shape."""

    most: int
    least: int = 0

    def __str__(self) -> str:
        return f"{self.least} to {self.most} rows"


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor of a state must be.

    Args:
        shape: its sizes after the batch.
        dtype: its precision.
        range: the smallest and the largest number that it may hold, for counts and positions; None for any.
        is_optional: whether a state may do without it.
    """

    shape: tuple[int | Rows, ...]
    dtype: torch.dtype
    range: tuple[int, int] | None = None
    is_optional: bool = False


StateSpec = Mapping[str, TensorSpec]  # by the names in `State.tensors`


def check(state: State, expected: StateSpec) -> None:
    """Raise an error unless the tensors of `state` are as expected; their batch size and device are those of the state."""
    missing = [name for name, spec in expected.items() if name not in state.tensors and not spec.is_optional]
    unknown = [name for name in state.tensors if name not in expected]
    if missing or unknown:
        names = (f"{name} (optional)" if spec.is_optional else name for name, spec in expected.items())
        _refuse(state, f"must have the tensors {', '.join(names)}; got {', '.join(state.tensors)}")
    lengths: dict[Rows, int] = {}
    for name, held in state.tensors.items():
        tensor, spec = rows(held), expected[name]
        if not torch.compiler.is_compiling() and tensor.is_neg():
            _refuse(state, f"must have no lazy views; got one as {name!r}")
        if tensor.dtype != spec.dtype or not _has_shape(tensor, spec, lengths):
            sizes = ", ".join(("batch", *map(str, spec.shape)))
            shared = ", the same number of rows in all tensors," if any(isinstance(size, Rows) for size in spec.shape) else ""
            _refuse(
                state,
                f"must have {name!r} with shape ({sizes}){shared} and dtype {spec.dtype}; "
                f"got shape {tuple(tensor.shape)} and dtype {tensor.dtype}",
            )
        if spec.range is not None and tensor.numel() and is_readable(tensor):
            least, most = (x.item() for x in tensor.aminmax())
            if not spec.range[0] <= least <= most <= spec.range[1]:
                low, high = spec.range
                _refuse(state, f"must have numbers from {low} to {high} in {name!r}; got {least} to {most}")


def is_readable(x: Tensor) -> bool:
    """Whether the numbers in x can be read: not in fake and meta tensors, nor in a call that is being traced."""
    return type(x) is Tensor and x.device.type != "meta" and not torch.compiler.is_compiling()


def _has_shape(tensor: Tensor, spec: TensorSpec, lengths: dict[Rows, int]) -> bool:
    """Whether the shape fits. `lengths` has the numbers of rows found so far, and gets those of this tensor."""
    if tensor.dim() != len(spec.shape) + 1:
        return False
    for size, expected in zip(tensor.shape[1:], spec.shape, strict=True):
        if isinstance(expected, Rows):
            if not expected.least <= size <= expected.most or size != lengths.setdefault(expected, size):
                return False
        elif size != expected:
            return False
    return True


def _refuse(state: State, rule: str) -> None:
    raise StateError(f"after {state.length} tokens, a state of {shown_text(state.method)} {rule}. {REPAIR}")
