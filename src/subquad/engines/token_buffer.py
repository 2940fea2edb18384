"""Keys and values that a state keeps, while later queries can still see them.

Rows are appended in place (`GrowingTensor`). Those that no later query can see stay until there are as many of them as of the others;
then the rows that matter move to a new buffer: a few operations a token, and never more than twice the rows that are needed.

B batch, K key-value heads, S rows kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from subquad.state import GrowingTensor, StateTensors

STEP = 256  # tokens that go on from a state at a time
_SPARE = 64  # rows; moving fewer than that is not worth it


def rows(part: Tensor | GrowingTensor) -> Tensor:
    return part if isinstance(part, Tensor) else part.rows


def append(state: StateTensors, new: Mapping[str, Tensor], recorded: bool) -> StateTensors:
    """`state` with the rows of `new` (B, K, n, ...) at the end of its parts of the same name."""
    grown = {}
    for name, x in new.items():
        old = state.get(name, x[:, :, :0])
        grown[name] = (GrowingTensor(old) if isinstance(old, Tensor) else old).append(x, recorded=recorded)
    return {**state, **grown}


def forget(state: StateTensors, names: Sequence[str], keep: Callable[[Tensor], Tensor], room: int) -> StateTensors:
    """Once the rows of the parts `names` are twice `room`, only the kept ones.

    The first of these parts (B, K, S, 1) numbers the rows, -1 for none. `keep` maps numbers (B, K, S) to bool, true for at most
    `room` of them.
    """
    number = rows(state[names[0]]).squeeze(-1)
    if number.shape[2] < 2 * max(room, _SPARE):
        return state
    kept = keep(number)
    order = kept.to(torch.int8).argsort(dim=2, descending=True, stable=True)[:, :, :room]  # (B, K, room)
    number = torch.where(kept, number, -1).gather(2, order).unsqueeze(-1)
    moved = {name: rows(state[name]) for name in names[1:]}
    moved = {name: x.gather(2, order.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])) for name, x in moved.items()}
    return {**state, names[0]: GrowingTensor(number), **{name: GrowingTensor(x) for name, x in moved.items()}}
