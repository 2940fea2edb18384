"""The operators `subquad::kernelized_forward` and `subquad::kernelized_backward`: attention as sums over keys, not over pairs.

The first returns the output (B, H, N, Dv), its denominators (B, H, N) and the sums after the last key; what is not asked for is
empty. The second returns the gradients of query, key and value. Both compute in float32 at least.

B batch, H query heads, K key-value heads, N queries, M keys, D channels, Dv value channels, m features.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from subquad.errors import InputError
from subquad.ops import dispatch, native_call
from subquad.ops.double_backward import gradients_of_gradients
from subquad.ops.feature_map import NativeKind, NativeMap, known_map
from subquad.ops.kernelized import native, pytorch
from subquad.ops.kernelized.rule import Inputs, KernelizedRule, Normalizer, Sums
from subquad.ops.library import Differentiable, define, fold_vmap
from subquad.ops.precision import compute_dtype

_KINDS, _NORMALIZERS = get_args(NativeKind), get_args(Normalizer)
_SUMS = ("S", "level", "count")


class _Rule(NamedTuple):
    """A `KernelizedRule` as tensors and numbers, and whether a call is causal: the last arguments of both operators."""

    weight: Tensor | None
    bias: Tensor | None
    kind: int
    normalizer: int
    scale: float
    constant: float
    floor: float
    is_causal: bool

    @classmethod
    def of(cls, rule: KernelizedRule, is_causal: bool) -> _Rule:
        native = rule.feature_map.native
        assert native is not None
        codes = _KINDS.index(native.kind), _NORMALIZERS.index(rule.normalizer)
        return cls(native.weight, native.bias, *codes, native.scale, native.constant, rule.floor, is_causal)

    def rule(self, channels: int) -> KernelizedRule:
        native = NativeMap(_KINDS[self.kind], self.scale, self.constant, self.weight, self.bias)
        feature_map = known_map(native, channels)
        return KernelizedRule(feature_map=feature_map, normalizer=_NORMALIZERS[self.normalizer], floor=self.floor)


RULE = "Tensor? weight, Tensor? bias, int kind, int normalizer, float scale, float constant, float floor, bool is_causal"
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? mask"


def checked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, given: Any) -> tuple[Inputs, _Rule]:
    """The arguments of an operator, which anybody may call: kernels read memory, so the tensors must fit together."""
    numbers = _Rule(*given)
    for x in (query, key, value):
        if x.dim() != 4:
            raise InputError(f"query, key and value must have 4 dimensions; got {tuple(x.shape)}.")
        if compute_dtype(x) != compute_dtype(query):
            raise InputError(f"query, key and value must have one dtype; got {x.dtype} and {query.dtype}.")
    (batch, heads, _, channels), (kv_heads, keys) = query.shape, key.shape[1:3]
    require(query, "query", (batch, heads, keys if numbers.is_causal else query.shape[2], channels))
    require(key, "key", (batch, kv_heads, keys, channels))
    require(value, "value", (batch, kv_heads, keys, value.shape[3]))
    if not kv_heads or heads % kv_heads:
        raise InputError(f"the number of key-value heads must divide that of query heads; got {kv_heads} and {heads}.")
    if mask is not None:
        require(mask, "mask", (batch, keys), torch.bool)
    kind, weight = _KINDS[numbers.kind], numbers.weight
    if weight is not None:
        require(weight, "weight", (*((kv_heads,) if kind == "trigonometric" else ()), weight.shape[-2], channels))
    if numbers.bias is not None:
        require(numbers.bias, "bias", (channels if weight is None else weight.shape[-2],))
    return Inputs(query.detach(), key.detach(), value.detach(), mask, numbers.is_causal), numbers


def require(x: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Raise an error unless `x` has this shape and dtype; None: any dtype."""
    if tuple(x.shape) != tuple(shape):
        raise InputError(f"{name} must have the shape {tuple(shape)}, to fit the others; got {tuple(x.shape)}.")
    if dtype not in (None, x.dtype):
        raise InputError(f"{name} must have the dtype {dtype}; got {x.dtype}.")


def _forward(body: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    *past, return_sums, return_denominators = given[:5]
    inputs, numbers = checked(query, key, value, mask, given[5:])
    sums = {name: t for name, t in zip(_SUMS, past, strict=True) if t is not None}
    out, found, denominators = body(inputs, numbers.rule(key.shape[3]), sums, return_sums, return_denominators)
    rest = (denominators, *(found.get(name) for name in _SUMS))
    return out, *(out.new_empty(0) if t is None else t for t in rest)


def _has_levels(inputs: Inputs, rule: KernelizedRule) -> bool:
    """Whether denominators are relative to running levels; the two bodies update those at different tokens."""
    return inputs.is_causal and "level" in native.sum_shapes(inputs.key, inputs.value, rule)


def _native_forward(
    inputs: Inputs, rule: KernelizedRule, sums: Sums, return_sums: bool, return_denominators: bool
) -> tuple[Tensor, Sums, Tensor | None]:
    return native.forward(inputs, rule, sums, return_sums=return_sums, return_denominators=return_denominators)


def _pytorch_forward(
    inputs: Inputs, rule: KernelizedRule, sums: Sums, return_sums: bool, return_denominators: bool
) -> tuple[Tensor, Sums, Tensor | None]:
    found, denominators = pytorch.attend(inputs, rule, sums)
    if _has_levels(inputs, rule):
        # NaN marks them as unusable by the kernel, whose levels differ; `_native_backward` checks for it.
        denominators = denominators * torch.nan
    out = native_call.empty_rows(inputs.query, inputs.value.shape[3]).copy_(found)
    return out, sums if return_sums else {}, denominators.squeeze(-1) if return_denominators else None


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    return_sums, return_denominators = given[3:5]
    rule = _Rule(*given[5:]).rule(key.shape[3])
    out = native_call.empty_rows(query, value.shape[3])
    shapes = native.sum_shapes(key, value, rule) if return_sums else {}
    denominators = out.new_empty(query.shape[:3] if return_denominators else 0)
    return out, denominators, *(out.new_empty(shapes.get(name, 0)) for name in _SUMS)


FORWARD = define(
    f"kernelized_forward({_INPUTS}, Tensor? sums, Tensor? level, Tensor? count, bool return_sums, bool return_denominators, "
    f"{RULE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_forward,
    pytorch=partial(_forward, _pytorch_forward),
    native=partial(_forward, _native_forward),
)


def _native_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    denominators: Tensor,
    sums: Tensor,
    level: Tensor,
    count: Tensor,
    *given: Any,
) -> tuple[Tensor, ...]:
    inputs, numbers = checked(query, key, value, mask, given)
    rule = numbers.rule(key.shape[3])
    if _has_levels(inputs, rule) and denominators.isnan().all():  # the forward pass ran in PyTorch
        return _pytorch_backward(grad, query, key, value, mask, out, denominators, sums, level, count, *given)
    found = {name: t for name, t in zip(_SUMS, (sums, level, count), strict=True) if t.numel()}
    shape = (*query.shape[:3], value.shape[3])
    shapes = {"grad": shape, "out": shape, "denominators": query.shape[:3], **native.sum_shapes(key, value, rule)}
    for name, x in {"grad": grad, "out": out, "denominators": denominators, **found}.items():
        require(x, name, shapes[name])
    return native.backward(grad, inputs, rule, out, denominators.to(out.dtype), found)


def _pytorch_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *given: Any
) -> tuple[Tensor, ...]:
    """By autograd; the results of the forward pass are not needed."""
    inputs, numbers = checked(query, key, value, mask, given[5:])
    with torch.inference_mode(False), torch.enable_grad():
        tensors = [x.clone().requires_grad_() for x in inputs[:3]]
        query, key, value = tensors
        recorded = Inputs(query, key, value, mask, numbers.is_causal)
        out, _ = pytorch.attend(recorded, numbers.rule(key.shape[3]), {})
        grads = torch.autograd.grad(out, tensors, grad.to(out.dtype), materialize_grads=True)
    return tuple(native_call.empty_rows(x, x.shape[3]).copy_(g) for x, g in zip(inputs[:3], grads, strict=True))


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(native_call.empty_rows(x, x.shape[3]) for x in (query, key, value))


BACKWARD = define(
    f"kernelized_backward(Tensor grad, {_INPUTS}, Tensor out, Tensor denominators, Tensor sums, Tensor level, Tensor count, "
    f"{RULE}) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    pytorch=_pytorch_backward,
    native=_native_backward,
)


def _save_backward(inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    numbers = _Rule(*inputs[10:])
    return (*inputs[:5], numbers.weight, numbers.bias), numbers[2:]


def _second_gradients(
    grads: tuple[Tensor, ...], saved: tuple[Any, ...], rest: tuple[Any, ...], needed: tuple[bool, ...]
) -> tuple[Any, ...]:
    """Gradients of gradients: everything is computed again, by autograd."""
    grad, query, key, value, mask, weight, bias = saved
    numbers = _Rule(weight, bias, *rest)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        inputs = Inputs(query, key, value, mask, numbers.is_causal)
        return pytorch.attend(inputs, numbers.rule(key.shape[3]), {})[0]

    found = gradients_of_gradients(forward, grad, (query, key, value), grads)
    return *(g if is_needed else None for g, is_needed in zip(found, needed, strict=False)), *[None] * (len(needed) - 4)


_BACKWARD = Differentiable(BACKWARD, 3, _save_backward, _second_gradients)


def _save(inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    numbers = _Rule(*inputs[9:])
    return (*inputs[:4], numbers.weight, numbers.bias, *output), numbers[2:]


def _gradients(
    grads: tuple[Tensor, ...], saved: tuple[Any, ...], rest: tuple[Any, ...], needed: tuple[bool, ...]
) -> tuple[Any, ...]:
    query, key, value, mask, weight, bias, *results = saved
    found = _BACKWARD(grads[0], query, key, value, mask, *(x.detach() for x in results), *_Rule(weight, bias, *rest))
    return *(g.to(x.dtype) for g, x in zip(found, (query, key, value), strict=True)), *[None] * (len(needed) - 3)


_FORWARD = Differentiable(FORWARD, 1, _save, _gradients)
fold_vmap(FORWARD, weights=(9, 10))
fold_vmap(BACKWARD, weights=(10, 11))


def rule_arguments(rule: KernelizedRule, *, is_causal: bool) -> tuple[Any, ...]:
    """The last arguments of the operators."""
    return _Rule.of(rule, is_causal)


def attend(inputs: Inputs, rule: KernelizedRule, past: Sums, *, return_sums: bool, needs_gradient: bool) -> tuple[Tensor, Sums]:
    """The output (B, H, N, Dv) and, with `return_sums`, the final sums. With gradients: no `past` and no `return_sums`."""
    if not needs_gradient and dispatch.can_use_compiled(*inputs[:3], *past.values()):
        # The body itself: when a single token is decoded, PyTorch's dispatcher takes longer than the kernel.
        dispatch.note("kernelized_forward")
        out, sums, _ = native.forward(inputs, rule, past, return_sums=return_sums, return_denominators=False)
        return out, sums
    keeps_sums = return_sums or (needs_gradient and not inputs.is_causal)
    past_sums = (past.get(name) for name in _SUMS)
    out, _, *found = _FORWARD(*inputs[:4], *past_sums, keeps_sums, needs_gradient, *_Rule.of(rule, inputs.is_causal))
    shapes = native.sum_shapes(inputs.key, inputs.value, rule)
    return out, {name: t for name, t in zip(_SUMS, found, strict=True) if name in shapes} if return_sums else {}
