"""Decode states that keep single tokens, and drop those that no later query can see.

Rows are appended in place (`GrowingTensor`). Rows that no later query can see stay until they may be half of all; then the
others move to a new buffer. That takes a few operations per token, and never more than about twice the rows that are needed.

B batch, K key-value heads, S rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.state_spec import Rows, TensorSpec
from subquad.engines.step import StateView
from subquad.growing_tensor import GrowingTensor
from subquad.state import StateTensors, rows

_STEP = 256  # tokens that continue a state at a time; their mask over all keys of the state stays small
_MIN_ROWS = 64  # dropping fewer rows is not worth a copy


def steps(call: Call) -> list[tuple[slice, Call]]:
    """The call in pieces of at most `_STEP` tokens, each with its slice of the tokens."""
    length = call.query.shape[2]
    if length <= _STEP:
        return [(slice(0, length), call)] if length else []
    pieces = [slice(start, min(start + _STEP, length)) for start in range(0, length, _STEP)]
    return [(piece, _tokens(call, piece)) for piece in pieces]


def state_spec(call: Call) -> dict[str, TensorSpec]:
    """What all these states have: keys and values with the numbers of their tokens, -1 for unused rows, and a count (B,)."""
    kv_heads, kept, int64 = call.key.shape[1], Rows(call.seen), torch.int64
    return {
        "count": TensorSpec((), int64, range=(0, call.seen)),
        "key": TensorSpec((kv_heads, kept, call.key.shape[3]), call.key.dtype),
        "value": TensorSpec((kv_heads, kept, call.value.shape[3]), call.value.dtype),
        "number": TensorSpec((kv_heads, kept, 1), int64, range=(-1, call.seen - 1)),
    }


def append_rows(state: StateTensors, new: Mapping[str, Tensor], *, recorded: bool) -> StateTensors:
    """`state` with the rows `new` (B, K, n, ...) appended to its tensors of the same name.

    `recorded`: autograd may have saved the state's tensors, so none is changed in place.
    """
    grown = {}
    for name, x in new.items():
        old = state.get(name, x[:, :, :0])
        grown[name] = (GrowingTensor(old) if isinstance(old, Tensor) else old).append(x, recorded=recorded)
    return {**state, **grown}


def append_row(past: StateView, names: Sequence[str]) -> dict[str, GrowingTensor]:
    """The tensors `names` of a state with one more row each, which is not initialised."""
    return {name: (GrowingTensor(held) if isinstance(held := past[name], Tensor) else held).extended() for name in names}


def is_full(rows: int, max_kept: int) -> bool:
    """Whether `drop_rows` would drop some of so many rows."""
    return rows >= 2 * max(max_kept, _MIN_ROWS)


def drop_rows(state: StateTensors, names: Sequence[str], keep: Callable[[Tensor], Tensor], max_kept: int) -> StateTensors:
    """Once the tensors `names` have at least twice `max_kept` rows, leave only those to keep.

    The first of these tensors (B, K, S, 1) numbers the rows, -1 for unused ones. `keep` maps these numbers (B, K, S) to bool,
    and is True for at most `max_kept` of them.
    """
    number = rows(state[names[0]]).squeeze(-1)
    if not is_full(number.shape[2], max_kept):
        return state
    kept = keep(number)
    order = kept.to(torch.int8).argsort(dim=2, descending=True, stable=True)[:, :, :max_kept]  # (B, K, max_kept)
    number = torch.where(kept, number, -1).gather(2, order).unsqueeze(-1)
    moved = {name: rows(state[name]) for name in names[1:]}
    moved = {name: x.gather(2, order.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])) for name, x in moved.items()}
    return {**state, names[0]: GrowingTensor(number), **{name: GrowingTensor(x) for name, x in moved.items()}}


def _tokens(call: Call, piece: slice) -> Call:
    query, key, value = (x[:, :, piece] for x in (call.query, call.key, call.value))
    mask = None if call.key_padding_mask is None else call.key_padding_mask[:, piece]
    return replace(call, query=query, key=key, value=value, key_padding_mask=mask)
