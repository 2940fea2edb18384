"""k-means on signs, and attention of clustered queries, in compiled code (csrc/clustered/).

B batch, H query heads, K key-value heads, N queries, M keys, D channels, Dv value channels, C clusters, k top keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.ops import native_call
from subquad.ops.clustered.inputs import ClusterAttention, ClusteredInputs

_ASSIGN_SIZES = ("batch", "heads", "queries", "bits", "clusters", "iterations")
_AssignCall = native_call.structure("AssignCall", (*_ASSIGN_SIZES, "threads"), (), ("code",), ("real", "assignment"))
_SIZES = ("batch", "heads", "kv_heads", "queries", "keys", "channels", "value_channels", "clusters", "topk")
_VIEWS = ("query", "key", "value", "out", "grad", "d_query", "d_key", "d_value")
_POINTERS = ("rest", "mass", "level", "total", "assignment", "mask", "real", "top")
_Call = native_call.structure("ClusteredCall", (*_SIZES, "threads"), ("scale",), _VIEWS, _POINTERS)


def assign(code: Tensor, real: Tensor | None, clusters: int, iterations: int) -> Tensor:
    """As `subquad.ops.clustered.kmeans.assign`."""
    code = native_call.as_rows(code)
    assignment = code.new_empty(code.shape[:3], dtype=torch.int64)
    numbers = dict(zip(_ASSIGN_SIZES, (*code.shape, clusters, iterations), strict=True))
    pointers = {"real": None if real is None else real.contiguous(), "assignment": assignment}
    work = code.numel() * clusters * iterations // 256
    native_call.call("clustered_assign", _AssignCall, numbers, {"code": code}, pointers, work)
    return assignment


def forward(inputs: ClusteredInputs, clusters: int, topk: int, scale: float) -> tuple[Tensor, ClusterAttention]:
    """The output (B, H, N, Dv), and what `backward` needs in addition to the inputs."""
    query, key, value = (native_call.as_rows(x) for x in inputs[:3])
    out = native_call.empty_rows(inputs.query, value.shape[3])
    shape = (*query.shape[:2], clusters)
    shared = ClusterAttention(
        rest=query.new_empty(*shape, value.shape[3]),
        mass=query.new_empty(shape),
        level=query.new_empty(shape),
        total=query.new_empty(shape),
        top=query.new_empty(*shape, topk, dtype=torch.int32),
    )
    _call("clustered_forward", {"query": query, "key": key, "value": value, "out": out}, inputs, shared, scale)
    return out, shared


def backward(grad: Tensor, inputs: ClusteredInputs, shared: ClusterAttention, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from that of the output."""
    grad, query, key, value = (native_call.as_rows(x) for x in (grad, *inputs[:3]))
    d_query, d_key, d_value = (native_call.empty_rows(x, x.shape[3]) for x in inputs[:3])
    views = {"query": query, "key": key, "value": value, "grad": grad}
    views |= {"d_query": d_query, "d_key": d_key, "d_value": d_value}
    _call("clustered_backward", views, inputs, shared, scale)
    return d_query, d_key, d_value


def _call(function: str, views: dict[str, Tensor], inputs: ClusteredInputs, shared: ClusterAttention, scale: float) -> None:
    query, key, value, top = views["query"], views["key"], views["value"], shared.top
    sizes = (*query.shape[:2], key.shape[1], query.shape[2], *key.shape[2:], value.shape[3], *top.shape[2:])
    numbers = {**dict(zip(_SIZES, sizes, strict=True)), "scale": scale}
    tensors = {**shared._asdict(), "assignment": inputs.assignment, "mask": inputs.mask, "real": inputs.real}
    pointers = {name: None if t is None else t.contiguous() for name, t in tensors.items()}
    work = 2 * key.numel() * top.shape[2] + 2 * query.numel() * top.shape[3]
    native_call.call(function, _Call, numbers, views, pointers, work)
