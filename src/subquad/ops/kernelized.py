"""The kernelized engine's compiled loops, called from PyTorch: kernelized.cpp has what they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from subquad.ops import native_call

_KINDS = ("elu", "identity", "unit", "exponential", "relu", "softmax", "trigonometric")
_DIVISORS = ("sum", "mean", "none", "channel", "signed")


@dataclass(frozen=True)
class Map:
    """A feature map that the compiled loops know.

    Args:
        kind: elu(x) + 1; x, of queries times `scale`; [x / |x|, 1]; e^(u - scale |x|^2 / 2 + constant) and relu(u) + 0.001 with
            u = weight x + bias; softmax, over channels for queries, over positions for keys; or scale [sin u, cos u] with
            u = weight x / |x|, without a weight u = x.
        weight: (m, D), of sines and cosines (K, m, D).
        bias: (m,), or None for 0.
    """

    kind: Literal["elu", "identity", "unit", "exponential", "relu", "softmax", "trigonometric"]
    scale: float = 1.0
    constant: float = 0.0
    weight: Tensor | None = None
    bias: Tensor | None = None


_SIZES = ("batch", "heads", "kv_heads", "queries", "keys", "channels", "value_channels", "features")
_VIEWS = ("query", "key", "value", "out", "grad", "d_query", "d_key", "d_value")
_POINTERS = ("mask", "divisors", "weight", "bias", "sums_in", "level_in", "count_in", "sums_out", "level_out", "count_out")
_NUMBERS = (*_SIZES, "kind", "divisor", "is_causal")
_Call = native_call.structure("Call", (*_NUMBERS, "threads"), ("scale", "constant", "floor"), _VIEWS, _POINTERS)
_STATE = {"S": "sums", "level": "level", "count": "count"}


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    map: Map,
    features: int,
    divisor: str,
    floor: float,
    is_causal: bool,
    past: dict[str, Tensor] | None = None,
    return_sums: bool = False,
    return_divisors: bool = False,
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """The output, the sums after the last key, and what each query's output was divided by."""
    query, key, value = (native_call.as_rows(x) for x in (query, key, value))
    out = native_call.empty_rows(query, value.shape[3])
    batch, kv_heads, width = key.shape[0], key.shape[1], value.shape[3] + (divisor in ("sum", "channel", "signed"))
    sums, divisors = {}, None
    if return_sums:
        sums["S"] = query.new_empty(batch, kv_heads, features, width)
        if map.kind in ("exponential", "softmax"):
            sums["level"] = query.new_empty(batch, kv_heads, 1, 1 if map.kind == "exponential" else features)
        if divisor == "mean":
            sums["count"] = query.new_empty(batch, 1, 1, 1)
    if return_divisors:
        divisors = query.new_empty(query.shape[:3])
    before = {name: t.to(query.dtype).contiguous() for name, t in (past or {}).items()}
    given = {"divisors": divisors, "mask": None if mask is None else mask.contiguous()}
    given |= {f"{_STATE[name]}_in": t for name, t in before.items()} | {f"{_STATE[name]}_out": t for name, t in sums.items()}
    views = {"query": query, "key": key, "value": value, "out": out}
    _run("forward", map, features, divisor, floor, is_causal, views, given)
    return out, sums, divisors


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    divisors: Tensor,
    sums: dict[str, Tensor],
    *,
    map: Map,
    features: int,
    divisor: str,
    floor: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from that of the output; not causal, `sums` are those of the forward pass."""
    grad, query, key, value = (native_call.as_rows(x) for x in (grad, query, key, value))
    grads = [native_call.empty_rows(x, x.shape[3]) for x in (query, key, value)]
    views = {"query": query, "key": key, "value": value, "out": out, "grad": grad}
    views |= dict(zip(("d_query", "d_key", "d_value"), grads, strict=True))
    given = {"divisors": divisors, "mask": None if mask is None else mask.contiguous()}
    given |= {f"{_STATE[name]}_in": t for name, t in sums.items()}
    _run("backward", map, features, divisor, floor, is_causal, views, given)
    return grads[0], grads[1], grads[2]


def _run(
    which: str,
    map: Map,
    features: int,
    divisor: str,
    floor: float,
    is_causal: bool,
    views: dict[str, Tensor],
    given: dict[str, Tensor | None],
) -> None:
    query, key, value = views["query"], views["key"], views["value"]
    weights = {"weight": map.weight, "bias": map.bias}
    kept = {name: None if t is None else t.detach().to(query.dtype).contiguous() for name, t in weights.items()}
    sizes = (*query.shape[:2], key.shape[1], query.shape[2], *key.shape[2:], value.shape[3], features)
    rule = (_KINDS.index(map.kind), _DIVISORS.index(divisor), is_causal)
    reals = {"scale": map.scale, "constant": map.constant, "floor": floor}
    numbers = {**dict(zip(_NUMBERS, (*sizes, *rule), strict=True)), **reals}
    work = features * value.shape[3] * (query[..., 0].numel() + key[..., 0].numel())
    native_call.call(which, _Call, numbers, views, {**given, **kept}, work)
