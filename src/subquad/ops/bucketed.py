"""The bucketed engine's compiled loops, called from PyTorch: bucketed.cpp has what they do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.ops import native_call
from subquad.ops.double_backward import forbid_double_backward

_NUMBERS = ("batch", "heads", "kv_heads", "tokens", "channels", "value_channels")
_RULE = ("rounds", "buckets", "chunk", "shared", "is_causal")
_VIEWS = ("query", "key", "value", "out", "grad", "d_query", "d_key", "d_value")
_Call = native_call.structure("Call", (*_NUMBERS, *_RULE, "threads"), ("scale",), _VIEWS, ("query_bucket", "key_bucket", "lse"))


def attend(
    query: Tensor, key: Tensor, value: Tensor, query_bucket: Tensor, key_bucket: Tensor, rule: dict[str, int], scale: float
) -> Tensor:
    """As the engine's own `attend`; `rule` has its fields, and a token in bucket `buckets` is a pad."""
    out, _ = _Bucketed.apply(query, key, value, query_bucket, key_bucket, rule, scale)  # type: ignore[no-untyped-call]
    return out


class _Bucketed(torch.autograd.Function):
    """The output and the log-sum-exp of its scores."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, query_bucket: Tensor, key_bucket: Tensor, rule: dict[str, int], scale: float
    ) -> tuple[Tensor, Tensor]:
        query, key, value = (native_call.as_rows(x) for x in (query, key, value))
        out = native_call.empty_rows(query, value.shape[3])
        lse = query.new_empty(query.shape[:3])
        views = {"query": query, "key": key, "value": value, "out": out}
        _run("bucketed_forward", views, query_bucket, key_bucket, lse, rule, scale)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.rule, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        *tensors, query_bucket, key_bucket, out, lse = ctx.saved_tensors
        query, key, value, wide = (native_call.as_rows(x) for x in (*tensors, grad))
        grads = [native_call.empty_rows(x, x.shape[3]) for x in (query, key, value)]
        views = {"query": query, "key": key, "value": value, "out": out, "grad": wide}
        views |= dict(zip(("d_query", "d_key", "d_value"), grads, strict=True))
        _run("bucketed_backward", views, query_bucket, key_bucket, lse, ctx.rule, ctx.scale)
        narrow = [g.to(x.dtype) for g, x in zip(grads, tensors, strict=True)]
        return *forbid_double_backward(narrow, [grad, *tensors]), None, None, None, None


def _run(
    function: str,
    views: dict[str, Tensor],
    query_bucket: Tensor,
    key_bucket: Tensor,
    lse: Tensor,
    rule: dict[str, int],
    scale: float,
) -> None:
    query, key, value = views["query"], views["key"], views["value"]
    sizes = (*query.shape[:2], key.shape[1], *query.shape[2:], value.shape[3])
    numbers = {**dict(zip(_NUMBERS, sizes, strict=True)), **rule, "scale": scale}
    buckets = {"query_bucket": query_bucket.contiguous(), "key_bucket": key_bucket.contiguous()}
    work = 2 * query.numel() * 2 * rule["chunk"] * rule["rounds"]
    native_call.call(function, _Call, numbers, views, {**buckets, "lse": lse}, work)
