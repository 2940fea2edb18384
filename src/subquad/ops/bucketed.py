"""Softmax attention inside buckets, in compiled code (csrc/bucketed/bucketed.cpp)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.ops import native_call
from subquad.ops.double_backward import forbid_double_backward
from subquad.ops.precision import needs_gradient

_SIZES = ("batch", "heads", "kv_heads", "tokens", "channels", "value_channels")
_RULE = ("rounds", "buckets", "chunk", "shared", "is_causal")
_VIEWS = ("query", "key", "value", "out", "grad", "d_query", "d_key", "d_value")
_POINTERS = ("query_bucket", "key_bucket", "top", "sum")
_Call = native_call.structure("BucketedCall", (*_SIZES, *_RULE, "threads"), ("scale",), _VIEWS, _POINTERS)


class Rule(NamedTuple):
    """Which keys of its bucket a query sees: see `subquad.engines.bucketed`."""

    buckets: int
    rounds: int
    chunk: int  # tokens
    shared: bool  # queries and keys are the same vectors
    is_causal: bool


def attend(
    query: Tensor, key: Tensor, value: Tensor, query_bucket: Tensor, key_bucket: Tensor, rule: Rule, scale: float
) -> Tensor:
    """Attention in buckets (B, H, R, n) and (B, K, R, n), where bucket `rule.buckets` holds the pads."""
    run = _BucketedSoftmax.apply if needs_gradient(query, key, value) else _BucketedSoftmax.forward
    return run(query, key, value, query_bucket, key_bucket, rule, scale)[0]


class _BucketedSoftmax(torch.autograd.Function):
    """The output, the largest score of each query and `sum e^(score - largest)`."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, query_bucket: Tensor, key_bucket: Tensor, rule: Rule, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (native_call.as_rows(x) for x in (query, key, value))
        out = native_call.empty_rows(query, value.shape[3])
        top, total = query.new_empty(query.shape[:3]), query.new_empty(query.shape[:3])
        views = {"query": query, "key": key, "value": value, "out": out}
        pointers = dict(zip(_POINTERS, (query_bucket, key_bucket, top, total), strict=True))
        _call("bucketed_forward", views, pointers, rule, scale)
        return out, top, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        *tensors, ctx.rule, ctx.scale = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        *tensors, query_bucket, key_bucket, out, top, total = ctx.saved_tensors
        query, key, value, grad_rows = (native_call.as_rows(x) for x in (*tensors, grad))
        grads = [native_call.empty_rows(x, x.shape[3]) for x in (query, key, value)]
        views = {"query": query, "key": key, "value": value, "out": out, "grad": grad_rows}
        views |= dict(zip(("d_query", "d_key", "d_value"), grads, strict=True))
        pointers = dict(zip(_POINTERS, (query_bucket, key_bucket, top, total), strict=True))
        _call("bucketed_backward", views, pointers, ctx.rule, ctx.scale)
        found = [g.to(x.dtype) for g, x in zip(grads, tensors, strict=True)]
        return *forbid_double_backward(found, [grad, *tensors]), None, None, None, None


def _call(function: str, views: dict[str, Tensor], pointers: dict[str, Tensor], rule: Rule, scale: float) -> None:
    query, key, value = views["query"], views["key"], views["value"]
    sizes = (*query.shape[:2], key.shape[1], *query.shape[2:], value.shape[3])
    numbers = {**dict(zip(_SIZES, sizes, strict=True)), **rule._asdict(), "scale": scale}
    contiguous = {name: x.contiguous() for name, x in pointers.items()}
    work = 2 * query.numel() * 2 * rule.chunk * rule.rounds
    native_call.call(function, _Call, numbers, views, contiguous, work)
