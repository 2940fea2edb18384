"""The block-sparse engine: softmax over the keys that a layout lets each query see.

Read it in the order of a call: a mechanism defines a `layout` of `key_sets`; `plan` turns it into tile groups; `softmax`
computes attention over them; global tokens get rows of their own. A call that continues a state goes to `decoding` instead.

B batch, H query heads, n tokens, Dv value channels, g global tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines import dense
from subquad.engines.block_sparse import decoding, softmax
from subquad.engines.block_sparse.decoding import state_spec
from subquad.engines.block_sparse.layout import GlobalTokens, Layout
from subquad.engines.block_sparse.plan import plan
from subquad.engines.call import Call
from subquad.masks import put_back, real_first, take_tokens, zero_pads
from subquad.state import StateTensors

__all__ = ["GlobalTokens", "Layout", "attend", "state_spec"]


def attend(call: Call, layout: Layout) -> tuple[Tensor, StateTensors | None]:
    """The output (B, H, n, Dv), and the tensors of the new state if the call asks for them."""
    if call.key_padding_mask is not None:
        query, key, value = (zero_pads(x, call.key_padding_mask) for x in (call.query, call.key, call.value))
        call = replace(call, query=query, key=key, value=value)
    if call.state is not None:
        return decoding.attend(call, layout)
    out = _attend_sequence(call, layout)
    return out, decoding.initial_state(call, layout) if call.return_state else None


def _attend_sequence(call: Call, layout: Layout) -> Tensor:
    """A whole sequence: (B, H, n, Dv)."""
    if not call.query.numel():
        return call.query[..., :1].expand(*call.query.shape[:3], call.value.shape[-1])
    dtype, order = call.query.dtype, None
    if call.key_padding_mask is not None:
        order, mask = real_first(call.key_padding_mask)
        call, layout = _reorder(call, layout, order, mask)
    if call.global_mask is not None:
        layout = replace(layout, global_tokens=_positions(call.global_mask))
    outs = []
    for heads, key_sets in layout.head_groups:
        groups = plan(call, layout, heads, key_sets)
        out, _ = softmax.attend(groups, call.query.shape[2], call.softmax_scale)
        outs.append(out.unflatten(0, (call.query.shape[0], call.query.shape[1] if heads is None else len(heads))))
    out = outs[0] if len(outs) == 1 else _merge_heads(outs, layout)
    if layout.global_tokens is not None:
        out = _set_global_rows(out, call, layout, layout.global_tokens)
    if order is not None:
        out = put_back(zero_pads(out, call.key_padding_mask), order)
    return out.to(dtype)


def _reorder(call: Call, layout: Layout, order: Tensor, mask: Tensor) -> tuple[Call, Layout]:
    """Everything that is given by token, in another order; pads are not global."""
    query, key, value = (take_tokens(x, order) for x in (call.query, call.key, call.value))
    global_mask = None if call.global_mask is None else call.global_mask.gather(1, order) & mask
    call = replace(call, query=query, key=key, value=value, key_padding_mask=mask, global_mask=global_mask)
    if layout.global_rows is not None:
        query, key, value = (take_tokens(x, order) for x in layout.global_rows)
        layout = replace(layout, global_rows=(query, key, value))
    return call, layout


def _positions(global_mask: Tensor) -> GlobalTokens | None:
    most = int(global_mask.sum(1).max()) if global_mask.numel() else 0
    position, exists = (t[:, :most] for t in real_first(global_mask))
    return GlobalTokens(position, exists) if most else None


def _set_global_rows(out: Tensor, call: Call, layout: Layout, tokens: GlobalTokens) -> Tensor:
    """`out` (B, H, n, Dv) with the rows of global tokens, which see all tokens, or when causal all before them."""
    position, exists = (t.expand(call.query.shape[0], -1) for t in tokens)
    query, key, value = layout.global_rows or (call.query, call.key, call.value)
    length = query.shape[2]
    visible = exists.unsqueeze(-1).expand(-1, -1, length)  # (B, g, n)
    if call.key_padding_mask is not None:
        visible = visible & call.key_padding_mask.unsqueeze(1)
    if call.is_causal:
        visible = visible & (torch.arange(length, device=query.device) <= position.unsqueeze(-1))
    rows = dense.attend_masked(take_tokens(query, position), key, value, visible.unsqueeze(1), call.softmax_scale)
    target = torch.where(exists, position, length)[:, None, :, None].expand(-1, out.shape[1], -1, out.shape[-1])
    return F.pad(out, (0, 0, 0, 1)).scatter(2, target, rows.to(out.dtype))[:, :, :length]


def _merge_heads(outs: list[Tensor], layout: Layout) -> Tensor:
    """The outputs of all groups of heads, in the order of the heads."""
    order = [head for heads, _ in layout.head_groups for head in heads or ()]
    return torch.cat(outs, dim=1)[:, [order.index(head) for head in range(len(order))]]
