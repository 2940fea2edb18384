"""The operators `subquad::bucketed_forward` and `subquad::bucketed_backward`: softmax over the keys of a query's buckets.

The first returns the output (B, H, n, E), the largest score of each query and `sum e^(score - largest)`, (B, H, n). The second
returns the gradients of query, key and value. Both compute in float32 at least.

B batch, H query heads, K key-value heads, n tokens, D channels, E value channels, R rounds.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from subquad.errors import InputError, UnsupportedError
from subquad.ops import dispatch, native_call
from subquad.ops.bucketed import native, pytorch
from subquad.ops.bucketed.rule import Rule
from subquad.ops.double_backward import FIRST_DERIVATIVES_ONLY
from subquad.ops.library import Differentiable, define, fold_vmap
from subquad.ops.precision import compute_dtype, needs_gradient
from subquad.ops.tensor_checks import require, require_heads

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor query_bucket, Tensor key_bucket"
_RULE = "int buckets, int rounds, int chunk, bool shared, bool is_causal, float scale"


def _checked(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors, the rule and the scale of an operator, which anybody may call: kernels read memory, so all must fit."""
    tensors, rule = given[:5], Rule(*given[5:10])
    query, key, value, query_bucket, key_bucket = tensors
    require_heads(query, key, value)
    (batch, heads, length, _), kv_heads = query.shape, key.shape[1]
    if min(rule.buckets, rule.rounds, rule.chunk) < 1:
        raise InputError(f"buckets, rounds and chunk must be at least 1; got {rule}.")
    for name, x, count in (("query_bucket", query_bucket, heads), ("key_bucket", key_bucket, kv_heads)):
        require(x, name, (batch, count, rule.rounds, length), torch.int64)
        if x.numel():
            least, most = (int(n) for n in x.aminmax())
            if least < 0 or most > rule.buckets:
                raise InputError(f"{name} must have numbers from 0 to {rule.buckets}; got {least} to {most}.")
    return *tensors, rule._replace(chunk=max(min(rule.chunk, length), 1)), given[10]


def _forward(body: ModuleType, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    arguments = _checked(given)
    if not arguments[0].numel() or not arguments[2].numel():
        out, top, total = _fake_forward(*given)
        return out.zero_(), top.zero_(), total.zero_()
    found: tuple[Tensor, Tensor, Tensor] = body.forward(*arguments)
    return found


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(query)
    top, total = (query.new_empty(query.shape[:3], dtype=dtype) for _ in range(2))
    return native_call.empty_rows(query, value.shape[3]), top, total


FORWARD = define(
    f"bucketed_forward({_INPUTS}, {_RULE}) -> (Tensor, Tensor, Tensor)",
    fake=_fake_forward,
    pytorch=partial(_forward, pytorch),
    native=partial(_forward, native),
)


def _backward(body: ModuleType, grad: Tensor, out: Tensor, top: Tensor, total: Tensor, *given: Any) -> tuple[Tensor, ...]:
    arguments = _checked(given)
    query, value = arguments[0], arguments[2]
    for name, x in {"grad": grad, "out": out}.items():
        require(x, name, (*query.shape[:3], value.shape[3]), None)
    for name, x in {"top": top, "total": total}.items():
        require(x, name, tuple(query.shape[:3]), compute_dtype(query))
    if not query.numel() or not value.numel():
        return tuple(x.zero_() for x in _fake_backward(grad, out, top, total, *given))
    return tuple(body.backward(grad.to(top.dtype), out.to(top.dtype), top, total, *arguments))


def _fake_backward(grad: Tensor, out: Tensor, top: Tensor, total: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple(native_call.empty_rows(x, x.shape[3]) for x in given[:3])


BACKWARD = define(
    f"bucketed_backward(Tensor grad, Tensor out, Tensor top, Tensor total, {_INPUTS}, {_RULE}) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    pytorch=partial(_backward, pytorch),
    native=partial(_backward, native),
)


def _save_backward(inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    return (), None


def _no_second_gradients(*_: Any) -> NoReturn:
    raise UnsupportedError(FIRST_DERIVATIVES_ONLY)


_BACKWARD = Differentiable(BACKWARD, 3, _save_backward, _no_second_gradients)


def _save(inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    return (*output, *inputs[:5]), inputs[5:]


def _gradients(
    grads: tuple[Tensor, ...], saved: tuple[Any, ...], rest: tuple[Any, ...], needed: tuple[bool, ...]
) -> tuple[Any, ...]:
    out, top, total, *inputs = saved
    found = _BACKWARD(grads[0], *(x.detach() for x in (out, top, total)), *inputs, *rest)
    return *(g.to(x.dtype) for g, x in zip(found, inputs, strict=False)), *[None] * (len(needed) - 3)


_FORWARD = Differentiable(FORWARD, 1, _save, _gradients)
fold_vmap(FORWARD, weights=())
fold_vmap(BACKWARD, weights=())


def attend(
    query: Tensor, key: Tensor, value: Tensor, query_bucket: Tensor, key_bucket: Tensor, rule: Rule, scale: float
) -> Tensor:
    """Attention in buckets (B, H, R, n) and (B, K, R, n), where bucket `rule.buckets` holds the pads."""
    dispatch.choose("bucketed", (query, key, value))
    given = query, key, value, query_bucket, key_bucket
    if dispatch.can_use_compiled(*given) and not needs_gradient(query, key, value) and query.numel() and value.numel():
        return native.forward(*given, rule._replace(chunk=min(rule.chunk, query.shape[2])), scale)[0]
    out: Tensor = _FORWARD(*given, *rule, scale)[0]
    return out
