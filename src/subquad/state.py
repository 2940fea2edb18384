"""Decode states: what a mechanism remembers of the tokens it has seen.

A state is a value. A call takes one and returns another, and the one it took stays as it was. To roll back, continue
from an earlier state, and a refused call changes nothing. A caller who will not use a state again can donate it: the call then
may overwrite its memory, which saves a copy for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subquad.errors import StateError, shown
from subquad.growing_tensor import GrowingTensor

StateTensors = dict[str, Tensor | GrowingTensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class State:
    """What one sequence, or a batch of them, leaves behind for the next token.

    `attention` and the modules make states. One that was made in another way, such as by `from_state_dict`, is checked when it
    is first continued.

    Args:
        method: the mechanism with its options, as text; no other mechanism may continue this state.
        kv_heads, head_dim, value_dim, dtype: of the keys and values seen.
        length: tokens seen, pads included.
        tensors: what the mechanism keeps, batch first; read-only.
    """

    method: str
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    length: int
    tensors: Mapping[str, Tensor | GrowingTensor] = field(repr=False)
    # Not copied by `replace`:
    _is_checked: bool = field(default=False, init=False, repr=False)
    _donor: State | None = field(default=None, init=False, repr=False)  # whom this state was donated by
    _uses: list[None] = field(default_factory=lambda: [None], init=False, repr=False)  # empty once the memory is overwritten
    _step: object = field(default=None, init=False, repr=False)  # what made this state, if it can be used again
    _is_exclusive: bool = field(default=False, init=False, repr=False)  # no other state has its memory

    def __post_init__(self) -> None:
        if isinstance(self.tensors, Mapping):
            object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))

    def __copy__(self) -> State:
        return self

    def __deepcopy__(self, _: object) -> State:
        return self.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, ({**{name: getattr(self, name) for name in _PLAIN}, "tensors": dict(self.tensors)},)

    @property
    def batch(self) -> int:
        return self._first.shape[0]

    @property
    def device(self) -> torch.device:
        return self._first.device

    @property
    def _first(self) -> Tensor:
        try:
            return rows(next(iter(self.tensors.values())))
        except (AttributeError, StopIteration):
            require_plausible(self)  # says what is wrong
            raise

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def donate(self) -> State:
        """This state, for a last call: `attention(..., state=state.donate(), return_state=True)` may overwrite its memory.

        After that call neither this state nor what `donate` returned can be used; if the call refuses its input, both can.
        """
        require_usable(self)
        return _with(self, _donor=self)

    def clone(self) -> State:
        """A copy that shares no memory with this state."""
        return self._map(Tensor.clone)

    def detach(self) -> State:
        """This state without the graph that computed it."""
        return self._map(Tensor.detach, _uses=self._uses)

    def to(self, device: torch.device | str) -> State:
        """This state on another device."""
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise StateError(f"device must be a device such as 'cpu' or 'cuda:0'; got {device!r}.") from error
        try:
            return self._map(lambda tensor: tensor.to(target), _uses=self._uses if target == self.device else [None])
        except (AssertionError, RuntimeError) as error:  # PyTorch was built without it, or this machine does not have it
            raise StateError(f"the state cannot be moved to {target}: {error}") from error

    def reorder(self, index: Tensor) -> State:
        """The batch rows listed in `index` (any length, repeats allowed), as beam search needs."""
        is_list = isinstance(index, Tensor) and index.layout == torch.strided and index.dim() == 1 and not index.is_meta
        if not is_list or index.dtype not in (torch.int32, torch.int64):
            came = (
                f"{tuple(index.shape)} {index.dtype} {index.layout} on {index.device}"
                if isinstance(index, Tensor)
                else shown(index)
            )
            raise StateError(f"index must be a dense 1-D int32 or int64 tensor of batch rows; got {came}.")
        if index.numel() and not bool((index >= 0).all() & (index < self.batch).all()):
            raise StateError(
                f"index must have rows from 0 to {self.batch - 1}, since the batch size is {self.batch}; got {index.tolist()}."
            )
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: `torch.save` writes it, `torch.load(..., weights_only=True)` reads it."""
        require_usable(self)
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
                f"a saved state must have the entries {', '.join(_PLAIN)} and tensors, a dictionary of at least one tensor; "
                f"got {came}. Pass what State.state_dict() returned."
            )
        state = cls(**saved)
        require_plausible(state)
        return state._map(lambda tensor: tensor.resolve_neg().clone())  # a donated state must not overwrite what was saved

    def _map(self, change: Callable[[Tensor], Tensor], **fields: Any) -> State:
        require_usable(self)
        changed = {
            name: change(tensor) if isinstance(tensor, Tensor) else GrowingTensor(change(tensor.rows))
            for name, tensor in self.tensors.items()
        }
        new = derived(self, tensors=changed)
        return _with(new, **fields) if fields else new


_PLAIN = ("method", "kv_heads", "head_dim", "value_dim", "dtype", "length")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rows(tensor: Tensor | GrowingTensor) -> Tensor:
    """What a state holds under one name, as a plain tensor."""
    return tensor if isinstance(tensor, Tensor) else tensor.rows


def is_checked(state: State) -> bool:
    """Whether its tensors are known to be what its method keeps, because a call returned it or because they were checked."""
    return state._is_checked


def checked(state: State) -> State:
    """`state`, marked as checked."""
    object.__setattr__(state, "_is_checked", True)
    return state


def derived(state: State, **changes: Any) -> State:
    """`state` with changes that leave it as sound as it was, so that it needs no new check."""
    new = replace(state, **changes)
    return checked(new) if state._is_checked else new


def renamed(state: State, method: str, tensors: Mapping[str, Tensor | GrowingTensor]) -> State:
    """`state` under the name of another method, with tensors added or left out; the others share its memory."""
    return _with(state, method=method, tensors=MappingProxyType(dict(tensors)), _donor=state if is_donated(state) else None)


def is_donated(state: State) -> bool:
    """Whether a call may overwrite its memory."""
    return state._donor is not None


def require_usable(state: State) -> None:
    """Raise an error if a call has taken its memory."""
    if not state._uses:
        raise StateError(_OVERWRITTEN)


def take_memory(state: State) -> None:
    """Make a donated state unusable, and the states that it comes from, before its memory is overwritten.

    Of several threads that try, one succeeds.
    """
    try:
        state._uses.pop()
    except IndexError:
        raise StateError(_OVERWRITTEN) from None
    if not torch.compiler.is_compiling():
        donor: State | None = state
        while donor is not None:
            vars(donor)["tensors"] = _Overwritten()
            donor = donor._donor


_OVERWRITTEN = (
    "this state was donated to a call that has overwritten its memory, so it cannot be used any more. Continue from the state "
    "that the call returned, or do not donate a state that is still needed."
)


class _Overwritten(Mapping[str, Tensor]):
    """The tensors of a state whose memory is overwritten."""

    def __getitem__(self, name: str) -> Tensor:
        raise StateError(_OVERWRITTEN)

    def __iter__(self) -> Iterator[str]:
        raise StateError(_OVERWRITTEN)

    def __len__(self) -> int:
        raise StateError(_OVERWRITTEN)


def prepared_step(state: State) -> object:
    """What made this state, and can continue it."""
    return state._step


def continued(state: State, tensors: StateTensors, *, step: object, is_exclusive: bool) -> State:
    """The state after one more token, made by `step`, which can make the next one, too.

    `is_exclusive`: no other state shares the memory of `tensors`.
    """
    changes = {"length": state.length + 1, "tensors": MappingProxyType(tensors), "_donor": None, "_uses": [None]}
    return _with(state, **changes, _step=step, _is_exclusive=is_exclusive)


def may_overwrite(state: State) -> bool:
    """Whether the step that made this state may change its tensors: it is donated, and no other state has its memory."""
    return state._donor is not None and state._is_exclusive


def _with(state: State, **changes: Any) -> State:
    """A copy that shares all that is not changed, faster than `replace`."""
    new = object.__new__(State)
    vars(new).update(vars(state), **changes)
    return new


def require_plausible(state: State) -> None:
    """Check what holds for the states of all methods: the types of values, and one batch size and device."""
    _require(state, "method", "text", isinstance(state.method, str))
    for name in ("kv_heads", "head_dim", "value_dim"):
        _require(state, name, "an integer from 1 to 2**31 - 1", _is_integer(getattr(state, name), 1))
    _require(
        state, "dtype", "float16, bfloat16, float32 or float64", isinstance(state.dtype, torch.dtype) and state.dtype in _DTYPES
    )
    _require(state, "length", "an integer from 0 to 2**31 - 1", _is_integer(state.length, 0))
    if not isinstance(state.tensors, Mapping) or not state.tensors:
        raise StateError(
            f"tensors of a state must be a dictionary of at least one tensor; got {shown(state.tensors)}. {REPAIR}"
        )
    first = None
    for name, tensor in state.tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, (Tensor, GrowingTensor)):
            raise StateError(
                f"tensors of a state must map text to tensors; got {shown(name)}: {type(tensor).__name__}. {REPAIR}"
            )
        found = rows(tensor)
        if found.layout != torch.strided or found.is_nested or not found.dim():
            raise StateError(
                f"the tensor {name!r} of a state must be dense, with the batch as its first dimension; "
                f"got shape {tuple(found.shape)} and layout {found.layout}. {REPAIR}"
            )
        first = found if first is None else first
        if found.shape[0] != first.shape[0] or found.device != first.device:
            raise StateError(
                f"the tensors of a state must all have the same batch size and device, {first.shape[0]} and {first.device}; "
                f"got {found.shape[0]} and {found.device} for {name!r}. {REPAIR}"
            )


REPAIR = "Pass a state that a call returned, or rebuild one with State.from_state_dict from what its state_dict() returned."


def _require(state: State, name: str, rule: str, holds: bool) -> None:
    if not holds:
        raise StateError(f"{name} of a state must be {rule}; got {shown(getattr(state, name))}. {REPAIR}")


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def _new(fields: dict[str, Any]) -> State:
    return State(**fields)
