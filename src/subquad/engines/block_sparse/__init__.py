"""The block-sparse engine: softmax over the keys that a layout lets each query see.

A mechanism defines a `layout`; the operator of `subquad.ops.sparse` computes a whole sequence. A call that continues a state
goes to `decoding` instead.

B batch, H query heads, n tokens, Dv value channels.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from subquad.engines.block_sparse import decoding
from subquad.engines.block_sparse.decoding import state_spec
from subquad.engines.block_sparse.layout import Layout
from subquad.engines.call import Call
from subquad.masks import zero_pads
from subquad.ops.sparse import operator
from subquad.ops.sparse.plan import Inputs
from subquad.state import StateTensors

__all__ = ["Layout", "attend", "state_spec"]


def attend(call: Call, layout: Layout) -> tuple[Tensor, StateTensors | None]:
    """The output (B, H, n, Dv), and the tensors of the new state if the call asks for them."""
    if call.state is not None:
        return decoding.attend(_without_pads(call), layout)
    out = _attend_sequence(call, layout)
    return out, decoding.initial_state(_without_pads(call), layout) if call.return_state else None


def _without_pads(call: Call) -> Call:
    """The call with pads set to 0: a state keeps them until they are dropped."""
    query, key, value = (zero_pads(x, call.key_padding_mask) for x in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value)


def _attend_sequence(call: Call, layout: Layout) -> Tensor:
    """A whole sequence: (B, H, n, Dv)."""
    inputs = Inputs(call.query, call.key, call.value, call.key_padding_mask, call.global_mask, draw=layout.draw)
    if layout.extra is not None:
        inputs = inputs._replace(extra_key=layout.extra[0], extra_value=layout.extra[1])
    if layout.global_rows is not None:
        query, key, value = layout.global_rows
        inputs = inputs._replace(global_query=query, global_key=key, global_value=value)
    return operator.attend(inputs, layout.pattern, call.softmax_scale, call.is_causal).to(call.query.dtype)
