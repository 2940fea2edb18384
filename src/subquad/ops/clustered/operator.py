"""The operators of clustered attention.

`subquad::clustered_assign` returns the cluster (B, H, N) of each query. `subquad::clustered_forward` returns the output (B, H,
N, Dv) and the fields of `ClusterAttention`. `subquad::clustered_backward` returns the gradients of query, key and value. They
compute in float32 at least. There are at most as many clusters as queries, and as many top keys as keys.

B batch, H query heads, K key-value heads, N queries, M keys, D channels, Dv value channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.errors import InputError
from subquad.ops import native_call
from subquad.ops.arguments import require_dtype, require_groups, require_heads, require_range, require_shape
from subquad.ops.clustered import kmeans, native, pytorch
from subquad.ops.clustered.inputs import ClusterAttention, ClusteredInputs
from subquad.ops.double_backward import gradients_of_gradients
from subquad.ops.library import Differentiable, define, fold_vmap
from subquad.ops.precision import compute_dtype, upcast

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor assignment, Tensor? mask, Tensor? real"


def _assign(body: Any, code: Tensor, real: Tensor | None, clusters: int, iterations: int) -> Tensor:
    require_heads(code=code)
    _require_mask(real, "real", (code.shape[0], code.shape[2]))
    if clusters < 1 or iterations < 0 or not code.shape[3]:
        raise InputError(
            f"k-means needs clusters and bits; got clusters={clusters}, iterations={iterations}, {code.shape[3]} bits."
        )
    if not code.numel():
        return _fake_assign(code, real, clusters, iterations)
    found: Tensor = body(upcast(code.detach()), real, min(clusters, code.shape[2]), iterations)
    return found


def _fake_assign(code: Tensor, real: Tensor | None, clusters: int, iterations: int) -> Tensor:
    return code.new_empty(code.shape[:3], dtype=torch.int64)


ASSIGN = define(
    "clustered_assign(Tensor code, Tensor? real, int clusters, int iterations) -> Tensor",
    fake=_fake_assign,
    pytorch=lambda *given: _assign(kmeans.assign, *given),
    native=lambda *given: _assign(native.assign, *given),
)
fold_vmap(ASSIGN)


def _require_mask(mask: Tensor | None, name: str, shape: tuple[int, int]) -> None:
    if mask is not None:
        require_shape(mask, name, shape)
        require_dtype(mask, name, torch.bool)


def _checked(given: tuple[Any, ...]) -> tuple[ClusteredInputs, int, int, float]:
    """The inputs, the numbers of clusters and of top keys, and the scale."""
    inputs, (clusters, topk, scale) = ClusteredInputs(*given[:6]), given[6:]
    query, key, value, assignment, mask, real = inputs
    require_heads(query=query, key=key, value=value)
    (batch, heads, queries, channels), (kv_heads, keys) = query.shape, key.shape[1:3]
    require_shape(key, "key", (batch, kv_heads, keys, channels))
    require_shape(value, "value", (batch, kv_heads, keys, value.shape[3]))
    require_groups(heads, kv_heads)
    require_shape(assignment, "assignment", (batch, heads, queries))
    require_dtype(assignment, "assignment", torch.int64)
    _require_mask(mask, "mask", (batch, keys))
    _require_mask(real, "real", (batch, queries))
    if clusters < 1 or topk < 0:
        raise InputError(f"clusters must be at least 1, and topk at least 0; got {clusters} and {topk}.")
    clusters, topk = min(clusters, queries), min(topk, keys)
    require_range(assignment, "assignment", 0, clusters - 1)
    return ClusteredInputs(query.detach(), key.detach(), value.detach(), assignment, mask, real), clusters, topk, scale


def _forward(body: Any, *given: Any) -> tuple[Tensor, ...]:
    inputs, clusters, topk, scale = _checked(given)
    if not inputs.query.shape[2] or not inputs.key.shape[2]:
        return tuple(x.zero_() for x in _fake_forward(*given))
    out, shared = body(inputs, clusters, topk, scale)
    return out, *shared


def _pytorch_forward(inputs: ClusteredInputs, clusters: int, topk: int, scale: float) -> tuple[Tensor, ClusterAttention]:
    out, shared = pytorch.attend(_upcast(inputs), clusters, topk, scale)
    return native_call.empty_rows(inputs.query, out.shape[3]).copy_(out), shared


def _upcast(inputs: ClusteredInputs) -> ClusteredInputs:
    return inputs._replace(query=upcast(inputs.query), key=upcast(inputs.key), value=upcast(inputs.value))


def _fake_forward(*given: Any) -> tuple[Tensor, ...]:
    query, key, value = given[:3]
    clusters, topk = torch.sym_min(given[6], query.shape[2]), torch.sym_min(given[7], key.shape[2])
    out = native_call.empty_rows(query, value.shape[3])
    shape = (*query.shape[:2], clusters)
    rest, *levels = (out.new_empty(*shape, *last) for last in ((value.shape[3],), (), (), ()))
    return out, rest, *levels, out.new_empty(*shape, topk, dtype=torch.int32)


FORWARD = define(
    f"clustered_forward({_INPUTS}, int clusters, int topk, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_forward,
    pytorch=lambda *given: _forward(_pytorch_forward, *given),
    native=lambda *given: _forward(native.forward, *given),
)


def _native_backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    inputs, clusters, topk, scale = _checked(given[:6] + given[11:])
    shared, (query, key, value) = ClusterAttention(*given[6:11]), inputs[:3]
    require_shape(grad, "grad", (*query.shape[:3], value.shape[3]))
    shape = (*query.shape[:2], clusters)
    ends = {"rest": (value.shape[3],), "mass": (), "level": (), "total": (), "top": (topk,)}
    for name, x in shared._asdict().items():
        require_shape(x, name, (*shape, *ends[name]))
        require_dtype(x, name, torch.int32 if name == "top" else compute_dtype(query))
    require_range(shared.top, "top", -1, key.shape[2] - 1)
    if not query.shape[2] or not key.shape[2]:
        return tuple(x.zero_() for x in _fake_backward(grad, *inputs))
    return native.backward(grad.to(compute_dtype(query)), inputs, shared, scale)


def _pytorch_backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """By autograd; the results of the forward pass are not needed."""
    inputs, clusters, topk, scale = _checked(given[:6] + given[11:])
    require_shape(grad, "grad", (*inputs.query.shape[:3], inputs.value.shape[3]))
    if not inputs.query.shape[2] or not inputs.key.shape[2]:
        return tuple(x.zero_() for x in _fake_backward(grad, *inputs))
    with torch.inference_mode(False), torch.enable_grad():
        # Copies, because tensors of inference mode cannot be saved for a backward pass.
        recorded = ClusteredInputs._make(None if x is None else x.clone() for x in inputs)
        tensors = [x.requires_grad_() for x in recorded[:3]]
        out, _ = pytorch.attend(_upcast(recorded), clusters, topk, scale)
        grads = torch.autograd.grad(out, tensors, grad.to(out.dtype).clone(), materialize_grads=True)
    return tuple(native_call.empty_rows(x, x.shape[3]).copy_(g) for x, g in zip(inputs[:3], grads, strict=True))


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(native_call.empty_rows(x, x.shape[3]) for x in (query, key, value))


BACKWARD = define(
    f"clustered_backward(Tensor grad, {_INPUTS}, Tensor rest, Tensor mass, Tensor level, Tensor total, Tensor top, "
    "int clusters, int topk, float scale) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    pytorch=_pytorch_backward,
    native=_native_backward,
)


def _save_backward(inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    return inputs[:7], inputs[12:]


def _second_gradients(grads: tuple[Any, ...], saved: tuple[Any, ...], rest: tuple[Any, ...], needed: Any) -> tuple[Any, ...]:
    grad, query, key, value, assignment, mask, real = saved
    clusters, topk, scale = min(rest[0], query.shape[2]), min(rest[1], key.shape[2]), rest[2]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        inputs = ClusteredInputs(query, key, value, assignment, mask, real)
        return pytorch.attend(_upcast(inputs), clusters, topk, scale)[0]

    found = gradients_of_gradients(run, grad, (query, key, value), grads)
    return *(g if is_needed else None for g, is_needed in zip(found, needed, strict=False)), *[None] * (len(needed) - 4)


_BACKWARD = Differentiable(BACKWARD, 3, _save_backward, _second_gradients)


def _save(inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    return (*inputs[:6], *output[1:]), inputs[6:]


def _gradients(grads: tuple[Any, ...], saved: tuple[Any, ...], rest: tuple[Any, ...], needed: Any) -> tuple[Any, ...]:
    found = _BACKWARD(grads[0], *saved[:6], *(x.detach() for x in saved[6:]), *rest)
    return *(g.to(x.dtype) for g, x in zip(found, saved[:3], strict=True)), *[None] * (len(needed) - 3)


_FORWARD = Differentiable(FORWARD, 1, _save, _gradients)
fold_vmap(FORWARD)
fold_vmap(BACKWARD)


def attend(inputs: ClusteredInputs, clusters: int, topk: int, scale: float) -> Tensor:
    """The output (B, H, N, Dv), in the precision that it was computed in."""
    out: Tensor = _FORWARD(*inputs, clusters, topk, scale)[0]
    return out
