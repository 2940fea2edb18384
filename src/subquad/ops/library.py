"""The PyTorch operators `subquad::...`: torch.compile, torch.export and fake tensors see an operator, and not its body.

An operator has a schema of tensors and numbers, a rule for the shapes and strides of its results, a body in PyTorch for every
device, and the compiled kernel as its body on CPUs. The body is chosen when the operator runs: a model that was compiled or
exported where there are kernels also runs where there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.errors import UnsupportedError
from subquad.ops import dispatch
from subquad.ops.precision import needs_gradient

_LIBRARY = torch.library.Library("subquad", "DEF")
# Result strides follow argument strides, so a compiler must not change them. Older PyTorch can only promise their order.
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)


def define(
    schema: str, *, fake: Callable[..., Any], pytorch: Callable[..., Any], native: Callable[..., Any]
) -> torch._ops.OpOverload:
    """The operator with this schema; `fake`, `pytorch` and `native` take its arguments and return its results."""
    name = schema[: schema.index("(")]

    def on_cpu(*given: Any) -> Any:
        if not dispatch.has_kernels():
            return elsewhere(*given)
        dispatch.note(name)
        return native(*given)

    def elsewhere(*given: Any) -> Any:
        dispatch.note(name, given=given)
        return pytorch(*given)

    def shapes(*given: Any) -> Any:
        dispatch.note(name, given=given, is_fake=True)
        return fake(*given)

    _LIBRARY.define(schema, tags=(_STRIDES, torch.Tag.pt2_compliant_tag))
    _LIBRARY.impl(name, on_cpu, "CPU")
    _LIBRARY.impl(name, elsewhere, "CompositeExplicitAutograd")
    torch.library.register_fake(f"subquad::{name}", shapes, lib=_LIBRARY)
    operator: torch._ops.OpOverload = getattr(torch.ops.subquad, name).default
    return operator


class Differentiable:
    """An operator with a gradient.

    Traced calls, and direct calls of the operator, use the formula registered by `torch.library.register_autograd`. Eager calls
    through this class use a `torch.autograd.Function`, because only that works under the transformations of `torch.func`.

    Args:
        operator: returns one tensor or several.
        outputs: how many of these have a gradient; they come first.
        save: takes (arguments, results); returns the tensors to save for `gradients`, and any other values it needs.
        gradients: takes (gradients of the outputs, saved tensors, other values, which arguments need a gradient); returns one
            gradient per argument.
    """

    def __init__(
        self,
        operator: torch._ops.OpOverload,
        outputs: int,
        save: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[tuple[Any, ...], Any]],
        gradients: Callable[..., tuple[Any, ...]],
    ) -> None:
        self.operator = operator

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            tensors, ctx.rest = save(inputs, output)
            ctx.save_for_backward(*tensors)

        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return gradients(grads[:outputs], ctx.saved_tensors, ctx.rest, ctx.needs_input_grad)

        class Function(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(*given: Any) -> Any:
                return operator(*given)

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                if not isinstance(output, Tensor):
                    ctx.mark_non_differentiable(*output[outputs:])
                setup_context(ctx, inputs, output)

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
                return backward(ctx, *grads)

        self._function = Function
        torch.library.register_autograd(operator, backward, setup_context=setup_context, lib=_LIBRARY)

    def __call__(self, *given: Any) -> Any:
        if torch.compiler.is_compiling() or not needs_gradient(*(x for x in given if isinstance(x, Tensor))):
            return self.operator(*given)
        return self._function.apply(*given)  # type: ignore[no-untyped-call]


def fold_vmap(operator: torch._ops.OpOverload, weights: Sequence[int] = ()) -> None:
    """Make `torch.func.vmap` of an operator one call: the mapped dimension becomes part of the batch.

    All tensors, in and out, have the batch as their first dimension, except the arguments at the positions in `weights`.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[Any, Any]:
        size = info.batch_size
        mapped = [place for place in weights if in_dims[place] is not None]
        if mapped:
            raise UnsupportedError(
                f"torch.func.vmap of {operator} cannot map over its weights, which all sequences of a batch share; argument "
                f"{mapped[0]} is mapped. Loop over the weights instead, or, with a kernelized mechanism, call vmap inside "
                "subquad.ops.disabled()."
            )

        def folded(x: Any, dim: int | None, place: int) -> Any:
            if not isinstance(x, Tensor) or place in weights:
                return x
            x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        def unfolded(x: Tensor) -> Tensor:
            return x.unflatten(0, (size, x.shape[0] // size))

        results = operator(*(folded(x, dim, place) for place, (x, dim) in enumerate(zip(given, in_dims, strict=True))))
        if isinstance(results, Tensor):
            return unfolded(results), 0
        return tuple(map(unfolded, results)), (0,) * len(results)

    torch.library.register_vmap(operator, rule, lib=_LIBRARY)
