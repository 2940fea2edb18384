"""The operators `subquad::hybrid_forward` and `subquad::hybrid_backward`: softmax over near keys, a feature map over far ones.

The first returns the output (B, H, n, Dv), and (B, H, n) each: the level of the weights, their sum relative to it, and the sum
of the far ones; see `pytorch.Results`. The second returns the gradients of query, key, value, projected query and key, and that
of log_mix for each sequence, (B, H). Both compute in float32 at least.

B batch, H query heads, K key-value heads, n tokens, D channels, Dv value channels, P channels of a projected query or key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from subquad.errors import InputError
from subquad.ops import dispatch
from subquad.ops.double_backward import gradients_of_gradients
from subquad.ops.feature_map import NativeKind
from subquad.ops.hybrid import native, pytorch
from subquad.ops.hybrid.rule import HybridRule, Inputs
from subquad.ops.kernelized.operator import require
from subquad.ops.library import Differentiable, define, fold_vmap
from subquad.ops.precision import compute_dtype

_KINDS = get_args(NativeKind)
_POSITIVE = ("elu", "relu", "hedgehog")  # the maps with phi = f >= 0 and without weights
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor projected_query, Tensor projected_key, Tensor? mask, Tensor log_mix"
_RULE = "int kind, int window, float scale, bool is_causal"


def _checked(given: tuple[Any, ...]) -> tuple[Inputs, HybridRule]:
    """The arguments of an operator, which anybody may call: kernels read memory, so the tensors must fit together."""
    inputs, (kind, *numbers) = Inputs(*given[:7]), given[7:]
    query, key, value, projected_query, projected_key, mask, log_mix = inputs
    for x in inputs[:5]:
        if x.dim() != 4:
            raise InputError(f"query, key, value and what is projected must have 4 dimensions; got {tuple(x.shape)}.")
        if compute_dtype(x) != compute_dtype(query):
            raise InputError(f"query, key, value and what is projected must have one dtype; got {x.dtype} and {query.dtype}.")
    (batch, heads, length, channels), kv_heads = query.shape, key.shape[1]
    if not kv_heads or heads % kv_heads:
        raise InputError(f"the number of key-value heads must divide that of query heads; got {kv_heads} and {heads}.")
    require(key, "key", (batch, kv_heads, length, channels))
    require(value, "value", (batch, kv_heads, length, value.shape[3]))
    require(projected_query, "projected_query", (batch, heads, length, projected_query.shape[3]))
    require(projected_key, "projected_key", (batch, kv_heads, length, projected_query.shape[3]))
    require(log_mix, "log_mix", (heads,))
    if mask is not None:
        require(mask, "mask", (batch, length), torch.bool)
    if not 0 <= kind < len(_KINDS) or _KINDS[kind] not in _POSITIVE:
        known = ", ".join(f"{_KINDS.index(name)} ({name})" for name in _POSITIVE)
        raise InputError(f"kind must be one of {known}; got {kind}.")
    rule = HybridRule(_KINDS[kind], *numbers)
    if rule.window < 0:
        raise InputError(f"window must be at least 0; got {rule.window}.")
    return inputs, rule


def _forward(body: Any, *given: Any) -> tuple[Tensor, ...]:
    inputs, rule = _checked(given)
    detached = (None if x is None else x.detach() for x in inputs)
    results: tuple[Tensor, ...] = body(Inputs(*detached), rule)  # type: ignore[arg-type]
    return results


def _pytorch_forward(inputs: Inputs, rule: HybridRule) -> tuple[Tensor, ...]:
    found = pytorch.attend(inputs, rule)
    return tuple(to.copy_(x) for to, x in zip(native.empty_results(inputs), found, strict=True))


def _fake_forward(*given: Any) -> tuple[Tensor, ...]:
    return native.empty_results(Inputs(*given[:7]))


FORWARD = define(
    f"hybrid_forward({_INPUTS}, {_RULE}) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_forward,
    pytorch=partial(_forward, _pytorch_forward),
    native=partial(_forward, native.forward),
)


def _native_backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    inputs, rule = _checked((*given[:7], *given[11:]))
    results = given[7:11]
    shape, dtype = (*inputs.query.shape[:3], inputs.value.shape[3]), compute_dtype(inputs.query)
    for name, x in zip(("grad", "out"), (grad, results[0]), strict=True):
        require(x, name, shape)
    for name, x in zip(("top", "total", "far"), results[1:], strict=True):
        require(x, name, shape[:3])
    return native.backward(grad.to(dtype), inputs, rule, *(x.to(dtype).contiguous() for x in results))


def _pytorch_backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """By autograd; the results of the forward pass are not needed."""
    inputs, rule = _checked((*given[:7], *given[11:]))
    with torch.inference_mode(False), torch.enable_grad():
        tensors = [x.detach().clone().requires_grad_() for x in _recorded(inputs)]
        out = pytorch.attend(_with_recorded(inputs, tensors), rule).out
        grads = torch.autograd.grad(out, tensors, grad.to(out.dtype), materialize_grads=True)
    into = (*native.empty_gradients(inputs), out.new_empty(inputs.query.shape[:2]))
    return tuple(to.copy_(g) for to, g in zip(into, grads, strict=True))


def _recorded(inputs: Inputs) -> tuple[Tensor, ...]:
    """The tensors that have gradients, with a log_mix for each sequence."""
    return *inputs[:5], inputs.log_mix.expand(inputs.query.shape[0], -1)


def _with_recorded(inputs: Inputs, tensors: Sequence[Tensor]) -> Inputs:
    """`inputs` with others in the place of `_recorded`."""
    *first, log_mix = tensors
    return Inputs(*first, inputs.mask, log_mix)  # type: ignore[call-arg]


def _fake_backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*given[:7])
    return *native.empty_gradients(inputs), grad.new_empty(inputs.query.shape[:2], dtype=compute_dtype(inputs.query))


BACKWARD = define(
    f"hybrid_backward(Tensor grad, {_INPUTS}, Tensor out, Tensor top, Tensor total, Tensor far, {_RULE}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    pytorch=_pytorch_backward,
    native=_native_backward,
)


def _save_backward(given: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    return given[:8], given[12:]


def _second_gradients(
    grads: tuple[Tensor, ...], saved: tuple[Any, ...], rest: tuple[Any, ...], needed: tuple[bool, ...]
) -> tuple[Any, ...]:
    grad, *tensors = saved
    inputs, rule = _checked((*tensors, *rest))

    def forward(*given: Tensor) -> Tensor:
        return pytorch.attend(_with_recorded(inputs, given), rule).out

    *found, by_sequence = gradients_of_gradients(forward, grad, _recorded(inputs), grads)
    return *found, None, by_sequence.sum(0).to(inputs.log_mix.dtype), *[None] * (len(needed) - 8)


_BACKWARD = Differentiable(BACKWARD, 6, _save_backward, _second_gradients)


def _save(given: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    return (*given[:7], *output), given[7:]


def _gradients(
    grads: tuple[Tensor, ...], saved: tuple[Any, ...], rest: tuple[Any, ...], needed: tuple[bool, ...]
) -> tuple[Any, ...]:
    inputs = Inputs(*saved[:7])
    *found, by_sequence = _BACKWARD(grads[0], *inputs, *(x.detach() for x in saved[7:]), *rest)
    cast = (g.to(x.dtype) for g, x in zip(found, inputs[:5], strict=True))
    return *cast, None, by_sequence.sum(0).to(inputs.log_mix.dtype), *[None] * len(rest)


_FORWARD = Differentiable(FORWARD, 1, _save, _gradients)
fold_vmap(FORWARD, weights=(6,))
fold_vmap(BACKWARD, weights=(7,))


def attend(inputs: Inputs, rule: HybridRule, *, needs_gradient: bool) -> Tensor:
    """The output (B, H, n, Dv)."""
    if not needs_gradient and dispatch.can_use_compiled(*inputs):
        return native.forward(inputs, rule)[0]  # the body itself: PyTorch's dispatcher takes its time
    out: Tensor = _FORWARD(*inputs, _KINDS.index(rule.kind), *rule[1:])[0]
    return out
