"""The operators `subquad::sparse_forward` and `subquad::sparse_backward`: softmax over the keys of a sparse pattern.

The first returns the output (B, H, n, E), the largest score of each row and `sum e^(score - largest)`, (B, H, n). The second
returns the gradients of query, key, value, extra keys and values (one for each batch entry), and of the queries, keys and
values of global rows; empty for what is not given. Both make the plan of the call inside, so that a graph has one call for all
lengths. The output is computed in float32 at least; gradients have the precision of what they belong to.

B batch, H query heads, K key-value heads, n tokens, D channels, E value channels, m extra keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from subquad.errors import InputError, UnsupportedError
from subquad.ops import dispatch
from subquad.ops.double_backward import FIRST_DERIVATIVES_ONLY
from subquad.ops.library import Differentiable, define, fold_vmap
from subquad.ops.precision import compute_dtype, needs_gradient
from subquad.ops.sparse.pattern import Pattern
from subquad.ops.sparse.plan import Inputs, Plan
from subquad.ops.tensor_checks import require, require_heads
from subquad.ops.tiles import differentiable, native, pytorch

_LEARNED = tuple(Inputs._fields.index(name) for name in Inputs._fields if name not in ("mask", "global_mask", "draw"))
_WEIGHTS = tuple(Inputs._fields.index(name) for name in ("extra_key", "extra_value", "draw"))
_INPUTS = "Tensor query, Tensor key, Tensor value, " + ", ".join(f"Tensor? {name}" for name in Inputs._fields[3:])
_NUMBERS = "int[] pattern, float scale, bool is_causal"


class _Body(NamedTuple):
    """Softmax over tile groups: in compiled code, or in PyTorch."""

    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    backward: Callable[..., list[Tensor]]


_NATIVE, _PYTORCH = _Body(native.forward, native.backward), _Body(pytorch.forward, pytorch.backward)


def _checked(given: Sequence[Any]) -> tuple[Inputs, Pattern]:
    """The arguments of an operator, which anybody may call: kernels read memory, so the tensors must fit together."""
    inputs, pattern = Inputs(*given[:-3]), Pattern.of(given[-3])
    query, key, value, *_ = inputs
    require_heads(query, key, value)
    (batch, heads, length, channels), kv_heads, width = query.shape, key.shape[1], value.shape[3]
    shapes: dict[str, tuple[int, ...]] = {"mask": (batch, length), "global_mask": (batch, length), "draw": (heads,)}
    shapes |= {"global_query": tuple(query.shape), "global_key": tuple(key.shape), "global_value": tuple(value.shape)}
    if inputs.extra_key is not None:
        extra = inputs.extra_key.shape[-2] if inputs.extra_key.dim() == 3 else 0
        shapes |= {"extra_key": (kv_heads, extra, channels), "extra_value": (kv_heads, extra, width)}
    dtypes = {"mask": torch.bool, "global_mask": torch.bool, "draw": torch.int64}
    dtypes |= dict.fromkeys(("global_query", "global_key", "global_value"), query.dtype)
    for name, shape in shapes.items():
        require(getattr(inputs, name), name, shape, dtypes.get(name))
    for names in (("extra_key", "extra_value"), ("global_query", "global_key", "global_value")):
        if len({getattr(inputs, name) is None for name in names}) > 1:
            raise InputError(f"{', '.join(names)} belong together; got only some of them.")
    if not pattern.fits_heads(heads):
        raise InputError(f"a sparse pattern must have every query head in one group; got {heads} heads and {pattern}.")
    if pattern.is_random and inputs.draw is None:
        raise InputError("a sparse pattern with random blocks needs `draw`, the hash keys of the heads; got None.")
    return inputs, pattern


def _forward(body: _Body, *given: Any) -> tuple[Tensor, ...]:
    return _run_forward(body, *_checked(given), *given[-2:])


def _run_forward(body: _Body, inputs: Inputs, pattern: Pattern, scale: float, is_causal: bool) -> tuple[Tensor, ...]:
    batch, heads, length, _ = inputs.query.shape
    if not inputs.query.numel() or not inputs.value.numel():
        return _fake_forward(*inputs)
    inputs = Inputs(*(x if x is None else x.detach() for x in inputs))  # type: ignore[arg-type]
    plan = Plan.of(inputs, pattern, is_causal, body is _NATIVE)
    rows: list[Tensor] = []
    for part in plan.parts:
        found = [x.unflatten(0, (batch, -1)) for x in body.forward(part.groups, length, scale)]
        if part.heads is None:
            rows = found
            continue
        rows = rows or [x.new_empty(batch, heads, *x.shape[2:]) for x in found]
        for to, x in zip(rows, found, strict=True):
            to[:, list(part.heads)] = x
    if plan.global_rows is not None:
        plan.global_rows.put(rows, body.forward([plan.global_rows.group], plan.global_rows.shape[1], scale))
    out, top, total = plan.padding.put_back(rows)
    if body is _PYTORCH and any(pytorch.are_uncountable(part.groups, scale) for part in plan.parts):
        total = -total  # marks them: the compiled kernel would round the scores in another way
    return out, top, total


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(query)
    out = query.new_empty(*query.shape[:3], value.shape[3], dtype=dtype)
    return out, query.new_empty(query.shape[:3], dtype=dtype), query.new_empty(query.shape[:3], dtype=dtype)


FORWARD = define(
    f"sparse_forward({_INPUTS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor)",
    fake=_fake_forward,
    pytorch=partial(_forward, _PYTORCH),
    native=partial(_forward, _NATIVE),
)


def _backward(body: _Body, grad: Tensor, out: Tensor, top: Tensor, total: Tensor, *given: Any) -> tuple[Tensor, ...]:
    inputs, pattern = _checked(given)
    shape, dtype = tuple(inputs.query.shape[:3]), compute_dtype(inputs.query)
    for name, x in {"grad": grad, "out": out}.items():
        require(x, name, (*shape, inputs.value.shape[3]), None)
    for name, x in {"top": top, "total": total}.items():
        require(x, name, shape, dtype)
    if not inputs.query.numel() or not inputs.value.numel():
        return tuple(x.zero_() for x in _fake_backward(grad, out, top, total, *given))
    if body is _NATIVE and (total < 0).any():
        out, top, total = _run_forward(body, inputs, pattern, *given[-2:])
    with torch.inference_mode(False), torch.enable_grad():
        leaves = {place: _leaf(inputs, place) for place in _LEARNED if inputs[place] is not None}
        recorded: list[Any] = [leaves.get(place, x) for place, x in enumerate(inputs)]
        plan = Plan.of(Inputs(*recorded), pattern, given[-1], body is _NATIVE)
    with torch.no_grad():
        outputs, grads = _group_gradients(body, plan, [grad.to(dtype), out.to(dtype), top, total.abs()], given[-2])
    with torch.inference_mode(False), torch.enable_grad():
        handed_over = _HandOver.apply(grads, *outputs)  # type: ignore[no-untyped-call]
    found = torch.autograd.grad(handed_over, list(leaves.values()), allow_unused=True, materialize_grads=True)
    by_place = {place: _like_rows(g, leaves[place]) for place, g in zip(leaves, found, strict=True)}
    return tuple(by_place.get(place, grad.new_empty(0)) for place in _LEARNED)


class _HandOver(torch.autograd.Function):
    """A number whose gradients are those in a list, which is emptied: autograd then adds others to them in place."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.grads = grads
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return None, *(ctx.grads.pop(0) for _ in range(len(ctx.grads)))


def _leaf(inputs: Inputs, place: int) -> Tensor:
    x: Any = inputs[place]
    x = x.clone() if x.is_inference() else x.detach()
    return (x.expand(inputs.query.shape[0], -1, -1, -1) if place in _WEIGHTS else x).requires_grad_()


def _group_gradients(body: _Body, plan: Plan, rows: list[Tensor], scale: float) -> tuple[list[Tensor], list[Tensor]]:
    """The queries, keys and values of all tile groups, and their gradients; `rows`: of the output, itself, top and total."""
    groups, grads, rows = [], [], plan.padding.take_rows(rows)
    if plan.global_rows is not None:
        groups.append(plan.global_rows.group)
        grad, *results = plan.global_rows.take(rows)
        grads += body.backward(grad, groups, *results, scale)
        rows[2:] = plan.global_rows.without(*rows[2:])
    for part in plan.parts:
        grad, *results = (x.flatten(0, 1) if part.heads is None else x[:, list(part.heads)].flatten(0, 1) for x in rows)
        groups += part.groups
        grads += body.backward(grad, part.groups, *results, scale)
    return _sums(differentiable(groups), grads)


def _sums(tensors: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Every tensor once, with the sum of its gradients; autograd would add them into new memory."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for x, grad in zip(tensors, grads, strict=True):
        if id(x) in found:
            found[id(x)][1].add_(grad)
        else:
            found[id(x)] = x, grad
    return [x for x, _ in found.values()], [grad for _, grad in found.values()]


def _like_rows(g: Tensor, x: Tensor) -> Tensor:
    """`g`, with heads and tokens in memory in the order of those of x."""
    return g.transpose(1, 2).contiguous().transpose(1, 2) if x.stride(1) < x.stride(2) else g.contiguous()


def _fake_backward(grad: Tensor, out: Tensor, top: Tensor, total: Tensor, *given: Any) -> tuple[Tensor, ...]:
    found = []
    for place in _LEARNED:
        x, batch = given[place], given[0].shape[0]
        if x is None:
            found.append(grad.new_empty(0))
        elif place in _WEIGHTS:
            found.append(x.new_empty(batch, *x.shape))
        else:
            found.append(_like_rows(x.new_empty(x.shape), x))
    return tuple(found)


BACKWARD = define(
    f"sparse_backward(Tensor grad, Tensor out, Tensor top, Tensor total, {_INPUTS}, {_NUMBERS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    pytorch=partial(_backward, _PYTORCH),
    native=partial(_backward, _NATIVE),
)


def _save_backward(inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    return (), None


def _no_second_gradients(*_: Any) -> NoReturn:
    raise UnsupportedError(FIRST_DERIVATIVES_ONLY)


_BACKWARD = Differentiable(BACKWARD, len(_LEARNED), _save_backward, _no_second_gradients)


def _save(inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    return (*output, *inputs[:-3]), inputs[-3:]


def _gradients(
    grads: tuple[Tensor, ...], saved: tuple[Any, ...], rest: tuple[Any, ...], needed: tuple[bool, ...]
) -> tuple[Any, ...]:
    out, top, total, *inputs = saved
    found = _BACKWARD(grads[0], *(x.detach() for x in (out, top, total)), *inputs, *rest)
    by_place: dict[int, Tensor] = dict(zip(_LEARNED, found, strict=True))
    for place in _WEIGHTS[:2]:
        by_place[place] = by_place[place].sum(0)
    return tuple(by_place[place] if is_needed and place in by_place else None for place, is_needed in enumerate(needed))


_FORWARD = Differentiable(FORWARD, 1, _save, _gradients)
fold_vmap(FORWARD, weights=_WEIGHTS)
fold_vmap(BACKWARD, weights=[place + 4 for place in _WEIGHTS])


def attend(inputs: Inputs, pattern: Pattern, scale: float, is_causal: bool) -> Tensor:
    """The output (B, H, n, E), in float32 or a higher precision."""
    dispatch.choose("sparse", inputs[:3])
    if dispatch.can_use_compiled(*inputs) and not needs_gradient(*(inputs[place] for place in _LEARNED)):
        return _run_forward(_NATIVE, inputs, pattern, scale, is_causal)[0]  # the body itself, without PyTorch's dispatcher
    out: Tensor = _FORWARD(*inputs, pattern.numbers, scale, is_causal)[0]
    return out
