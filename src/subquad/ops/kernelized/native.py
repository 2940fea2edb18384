"""The compiled kernel of the kernelized engine, called from PyTorch; csrc/kernelized/kernelized.cpp says what it computes.

B batch, H query heads, K key-value heads, N queries, M keys, D channels, Dv value channels, m features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from subquad.errors import StateError
from subquad.ops import native_call
from subquad.ops.feature_map import NativeKind
from subquad.ops.kernelized.rule import Inputs, KernelizedRule, Normalizer, Sums

# struct Call of csrc/kernelized/call.h, and its enums Kind and Normalizer, which have the order of the literals here.
_KINDS, _NORMALIZERS = get_args(NativeKind), get_args(Normalizer)
_SIZES = ("batch", "heads", "kv_heads", "queries", "keys", "channels", "value_channels", "features")
_VIEWS = ("query", "key", "value", "out", "grad", "d_query", "d_key", "d_value")
_SUMS = ("sums_in", "level_in", "count_in", "sums_out", "level_out", "count_out")
_NUMBERS = (*_SIZES, "kind", "normalizer", "is_causal", "is_reversed", "row_stride")
_REALS = ("scale", "constant", "floor")
_POINTERS = ("mask", "denominators", "weight", "bias", *_SUMS, "log_mix", "top", "sum", "d_log_mix")
_Call = native_call.structure("Call", (*_NUMBERS, "threads"), _REALS, _VIEWS, _POINTERS)
_SUM_FIELDS = {"S": "sums", "level": "level", "count": "count"}


def forward(
    inputs: Inputs, rule: KernelizedRule, past: Sums, *, return_sums: bool, return_denominators: bool
) -> tuple[Tensor, Sums, Tensor | None]:
    """The output (B, H, N, Dv), the sums after the last key, and the denominators (B, H, N)."""
    query, key, value = (native_call.as_rows(x) for x in inputs[:3])
    out = native_call.empty_rows(inputs.query, value.shape[3])
    shapes = sum_shapes(key, value, rule)
    if past and {name: t.shape for name, t in past.items()} != shapes:  # the kernel would read other memory
        found = {name: tuple(t.shape) for name, t in past.items()}
        raise StateError(
            f"the sums of a state must have the shapes {shapes}; got {found}. Do not resize the tensors of a state."
        )
    sums = {name: value.new_empty(shape) for name, shape in shapes.items()} if return_sums else {}
    denominators = query.new_empty(query.shape[:3]) if return_denominators else None
    pointers = _pointers(inputs, rule, past, query)
    pointers["denominators"] = denominators
    pointers |= {f"{_SUM_FIELDS[name]}_out": t for name, t in sums.items()}
    views = {"query": query, "key": key, "value": value, "out": out}
    native_call.call("forward", _Call, _numbers(views, inputs.is_causal, rule), views, pointers, _work(views, rule))
    return out, sums, denominators


def backward(
    grad: Tensor, inputs: Inputs, rule: KernelizedRule, out: Tensor, denominators: Tensor, sums: Sums
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value from that of the output; `sums` are those of the forward pass, if not causal."""
    grad, query, key, value = (native_call.as_rows(x) for x in (grad, *inputs[:3]))
    d_query, d_key, d_value = (native_call.empty_rows(x, x.shape[3]) for x in inputs[:3])
    views = {"query": query, "key": key, "value": value, "out": native_call.as_rows(out), "grad": grad}
    views |= {"d_query": d_query, "d_key": d_key, "d_value": d_value}
    pointers = _pointers(inputs, rule, sums, query)
    pointers["denominators"] = denominators.contiguous()
    native_call.call("backward", _Call, _numbers(views, inputs.is_causal, rule), views, pointers, _work(views, rule))
    return d_query, d_key, d_value


def step_call(query: Tensor, key: Tensor, value: Tensor, rule: KernelizedRule) -> tuple[object, Any]:
    """The arguments of a call of one token with a state, without the addresses of its tensors; and what must stay alive."""
    inputs = Inputs(query, key, value, None, True)
    views = {"query": query, "key": key, "value": value, "out": query.new_empty(*query.shape[:3], value.shape[3])}
    pointers = _pointers(inputs, rule, {}, query)
    return pointers, native_call.arguments(_Call, _numbers(views, True, rule), views, pointers, _work(views, rule))


def merge_forward(results: Sequence[Tensor], inputs: Inputs, rule: KernelizedRule, log_mix: Tensor, *, reverse: bool) -> None:
    """Add causal attention over `inputs`, with e^log_mix (H,) times the weights of the rule, to results of the same queries.

    The results are changed in place: the output (B, H, N, Dv); the level of its weights (B, H, N); their sum relative to it;
    and one that gets the sum of the rule's weights, 0 if that underflows. The last three are slices along N of contiguous
    tensors.
    `reverse`: each query attends to the keys from its own on, instead of those up to its own.
    """
    out, top, total, far = results
    query, key, value = (native_call.as_rows(x) for x in inputs[:3])
    pointers = _pointers(inputs, rule, {}, query)
    pointers |= {"log_mix": log_mix.contiguous(), "top": top, "sum": total, "denominators": far}
    views = {"query": query, "key": key, "value": value, "out": out}
    numbers = _numbers(views, True, rule) | {"is_reversed": reverse, "row_stride": top.stride(1)}
    native_call.call("forward", _Call, numbers, views, pointers, _work(views, rule))


def merge_backward(
    grads: Sequence[Tensor], results: Sequence[Tensor], inputs: Inputs, rule: KernelizedRule, *, reverse: bool
) -> Tensor:
    """The gradient of log_mix by query (B, H, N), through what `merge_forward` added.

    Those of the query, key and value of `inputs` are written to `grads`. The results are the gradient of the final output, that
    output, and denominators (B, H, N): a weight of the rule divided by its denominator is its share of all weights.
    """
    grad, out, denominators = results
    query, key, value = (native_call.as_rows(x) for x in inputs[:3])
    views = {"query": query, "key": key, "value": value, "out": out, "grad": grad}
    views |= dict(zip(("d_query", "d_key", "d_value"), grads, strict=True))
    denominators = denominators.contiguous()
    d_log_mix = torch.empty_like(denominators)
    pointers = _pointers(inputs, rule, {}, query) | {"denominators": denominators, "d_log_mix": d_log_mix}
    numbers = _numbers(views, True, rule) | {"is_reversed": reverse}
    native_call.call("backward", _Call, numbers, views, pointers, _work(views, rule))
    return d_log_mix


def sum_shapes(key: Tensor, value: Tensor, rule: KernelizedRule) -> dict[str, tuple[int, ...]]:
    """The shapes of `Sums`."""
    feature_map, (batch, kv_heads) = rule.feature_map, key.shape[:2]
    assert feature_map.native is not None
    shapes: dict[str, tuple[int, ...]] = {"S": (batch, kv_heads, feature_map.features, value.shape[3] + rule.has_ones)}
    if feature_map.native.kind == "exponential":
        shapes["level"] = (batch, kv_heads, 1, 1)
    elif feature_map.native.kind == "softmax":
        shapes["level"] = (batch, kv_heads, 1, feature_map.features)
    if rule.normalizer == "mean":
        shapes["count"] = (batch, 1, 1, 1)
    return shapes


def _pointers(inputs: Inputs, rule: KernelizedRule, past: Sums, like: Tensor) -> dict[str, Tensor | None]:
    """The contiguous tensors that the kernel reads, in the precision of `like`."""
    native = rule.feature_map.native
    assert native is not None
    pointers = {f"{_SUM_FIELDS[name]}_in": t.to(like.dtype).contiguous() for name, t in past.items()}
    for name, t in (("weight", native.weight), ("bias", native.bias)):
        if t is not None:
            pointers[name] = t.detach().to(like.dtype).contiguous()
    if inputs.mask is not None:
        pointers["mask"] = inputs.mask.contiguous()
    return pointers  # type: ignore[return-value]


def _numbers(views: dict[str, Tensor], is_causal: bool, rule: KernelizedRule) -> dict[str, float]:
    query, key, value, native = views["query"], views["key"], views["value"], rule.feature_map.native
    assert native is not None
    sizes = (*query.shape[:2], key.shape[1], query.shape[2], *key.shape[2:], value.shape[3], rule.feature_map.features)
    codes = (_KINDS.index(native.kind), _NORMALIZERS.index(rule.normalizer), is_causal, False, query.shape[2])
    numbers: dict[str, float] = dict(zip(_NUMBERS, (*sizes, *codes), strict=True))
    return numbers | {"scale": native.scale, "constant": native.constant, "floor": rule.floor}


def _work(views: dict[str, Tensor], rule: KernelizedRule) -> int:
    """Roughly the number of multiplications."""
    tokens = views["query"].shape[:3].numel() + views["key"].shape[:3].numel()
    return rule.feature_map.features * views["value"].shape[3] * tokens
