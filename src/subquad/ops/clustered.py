"""The clustered engine's compiled loops, called from PyTorch: clustered.cpp has what they do."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.ops import native_call

_AssignCall = native_call.structure(
    "AssignCall",
    ("batch", "heads", "queries", "bits", "clusters", "iterations", "threads"),
    (),
    ("code",),
    ("real", "assignment"),
)
_NUMBERS = ("batch", "heads", "kv_heads", "queries", "keys", "channels", "value_channels", "clusters", "topk")
_VIEWS = ("query", "key", "value", "out", "grad", "d_query", "d_key", "d_value")
_POINTERS = ("rest", "mass", "lse", "assignment", "mask", "real", "top")
_Call = native_call.structure("Call", (*_NUMBERS, "threads"), ("scale",), _VIEWS, _POINTERS)


def assign(code: Tensor, real: Tensor | None, clusters: int, iterations: int) -> Tensor:
    """As the engine's own `assign`."""
    code = native_call.as_rows(code)
    assignment = torch.empty(code.shape[:3], dtype=torch.int64)
    names = ("batch", "heads", "queries", "bits", "clusters", "iterations")
    numbers = dict(zip(names, (*code.shape, clusters, iterations), strict=True))
    given = {"real": None if real is None else real.contiguous(), "assignment": assignment}
    native_call.call(
        "clustered_assign", _AssignCall, numbers, {"code": code}, given, code.numel() * clusters * iterations // 256
    )
    return assignment


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    assignment: Tensor,
    mask: Tensor | None,
    real: Tensor | None,
    *,
    clusters: int,
    topk: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """The output, and what `backward` asks for besides."""
    query, key, value = (native_call.as_rows(x) for x in (query, key, value))
    out = native_call.empty_rows(query, value.shape[3])
    shape = (*query.shape[:2], clusters)
    found = {
        "rest": query.new_empty(*shape, value.shape[3]),
        "mass": query.new_empty(shape),
        "lse": query.new_empty(shape),
        "top": torch.empty(*shape, topk, dtype=torch.int32),
    }
    views = {"query": query, "key": key, "value": value, "out": out}
    _run("clustered_forward", views, {**found, "assignment": assignment, "mask": mask, "real": real}, scale)
    return out, *found.values()


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    assignment: Tensor,
    mask: Tensor | None,
    real: Tensor | None,
    rest: Tensor,
    mass: Tensor,
    lse: Tensor,
    top: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from that of the output."""
    grad, query, key, value = (native_call.as_rows(x) for x in (grad, query, key, value))
    grads = [native_call.empty_rows(x, x.shape[3]) for x in (query, key, value)]
    views = {"query": query, "key": key, "value": value, "grad": grad}
    views |= dict(zip(("d_query", "d_key", "d_value"), grads, strict=True))
    given = {"rest": rest, "mass": mass, "lse": lse, "top": top, "assignment": assignment, "mask": mask, "real": real}
    _run("clustered_backward", views, given, scale)
    return grads[0], grads[1], grads[2]


def _run(function: str, views: dict[str, Tensor], given: dict[str, Tensor | None], scale: float) -> None:
    query, key, value, top = views["query"], views["key"], views["value"], given["top"]
    assert top is not None
    sizes = (*query.shape[:2], key.shape[1], query.shape[2], *key.shape[2:], value.shape[3], *top.shape[2:])
    numbers = {**dict(zip(_NUMBERS, sizes, strict=True)), "scale": scale}
    kept = {name: None if t is None else t.contiguous() for name, t in given.items()}
    native_call.call(function, _Call, numbers, views, kept, 2 * key.numel() * top.shape[2] + 2 * query.numel() * top.shape[3])
