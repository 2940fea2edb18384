"""Softmax attention inside buckets, in compiled code; csrc/bucketed/bucketed.cpp says how."""

from __future__ import annotations

from torch import Tensor

from subquad.ops import native_call
from subquad.ops.bucketed.rule import Rule

_SIZES = ("batch", "heads", "kv_heads", "tokens", "channels", "value_channels")
_RULE = ("rounds", "buckets", "chunk", "shared", "is_causal")
_VIEWS = ("query", "key", "value", "out", "grad", "d_query", "d_key", "d_value")
_POINTERS = ("query_bucket", "key_bucket", "top", "sum")
_Call = native_call.structure("BucketedCall", (*_SIZES, *_RULE, "threads"), ("scale",), _VIEWS, _POINTERS)


def forward(
    query: Tensor, key: Tensor, value: Tensor, query_bucket: Tensor, key_bucket: Tensor, rule: Rule, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the largest score of each query and `sum e^(score - largest)`; 0 and 0 if only its own value counts."""
    out = native_call.empty_rows(query, value.shape[3])
    query, key, value = (native_call.as_rows(x) for x in (query, key, value))
    top, total = query.new_empty(query.shape[:3]), query.new_empty(query.shape[:3])
    views = {"query": query, "key": key, "value": value, "out": out}
    pointers = dict(zip(_POINTERS, (query_bucket, key_bucket, top, total), strict=True))
    _call("bucketed_forward", views, pointers, rule, scale)
    return out, top, total


def backward(
    grad: Tensor,
    out: Tensor,
    top: Tensor,
    total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bucket: Tensor,
    key_bucket: Tensor,
    rule: Rule,
    scale: float,
) -> list[Tensor]:
    """The gradients of query, key and value, from that of the output and what `forward` returned."""
    grads = [native_call.empty_rows(x, x.shape[3]) for x in (query, key, value)]
    views = {"query": query, "key": key, "value": value, "out": out, "grad": grad}
    views = {name: native_call.as_rows(x) for name, x in views.items()}
    views |= dict(zip(("d_query", "d_key", "d_value"), grads, strict=True))
    pointers = dict(zip(_POINTERS, (query_bucket, key_bucket, top, total), strict=True))
    _call("bucketed_backward", views, pointers, rule, scale)
    return grads


def _call(function: str, views: dict[str, Tensor], pointers: dict[str, Tensor], rule: Rule, scale: float) -> None:
    query, key, value = views["query"], views["key"], views["value"]
    sizes = (*query.shape[:2], key.shape[1], *query.shape[2:], value.shape[3])
    numbers = {**dict(zip(_SIZES, sizes, strict=True)), **rule._asdict(), "scale": scale}
    contiguous = {name: x.contiguous() for name, x in pointers.items()}
    work = 2 * query.numel() * 2 * rule.chunk * rule.rounds
    native_call.call(function, _Call, numbers, views, contiguous, work)
