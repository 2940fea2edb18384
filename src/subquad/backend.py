"""`backend`: which operators and bodies a call of `attention` would run, found by running it on tensors without numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.attention import MechanismModule, attention
from subquad.families.base import Mechanism
from subquad.growing_tensor import GrowingTensor
from subquad.ops import dispatch
from subquad.ops.dispatch import Choice
from subquad.ops.precision import needs_gradient
from subquad.registry import resolve
from subquad.state import State, derived, rows


@dataclass(frozen=True)
class Backend:
    """What computes a call.

    Args:
        method: the name of the mechanism.
        operators: the operators that would run, in order and each once, with their bodies and the reasons. Empty: everything is
            computed by PyTorch's own operations, and subquad has no compiled kernels for this call.
    """

    method: str
    operators: tuple[Choice, ...]

    @property
    def is_native(self) -> bool:
        """Whether compiled kernels compute what they can compute for this mechanism."""
        return bool(self.operators) and all(choice.is_native for choice in self.operators)

    def __str__(self) -> str:
        if not self.operators:
            return f"{self.method}: PyTorch's own operations; there are no compiled kernels for this call"
        return "\n".join([f"{self.method}:", *(f"  {choice}" for choice in self.operators)])


def backend(
    query: Tensor, key: Tensor, value: Tensor, method: str | Mechanism | MechanismModule = "softmax", **options: Any
) -> Backend:
    """Which operators and bodies `attention(query, key, value, method, **options)` would run, and why not compiled kernels.

    Nothing is computed: the call runs on tensors that have shapes but no numbers. With inputs that require gradients, the
    operators of the backward pass are included. What depends on the numbers, such as a NaN among them, is not foreseen.

    Args:
        query, key, value: as for `attention`.
        method: a name, a mechanism, or a module that `Mechanism.build` made, which is called in evaluation mode.
        options: the other arguments of `attention`, or of the module.

    Raises:
        SubquadError: as `attention`.
    """
    if isinstance(method, MechanismModule):
        module = deepcopy(method).eval()
        return Backend(module.method.info.name, operators_of(module, query, key, value, **options))
    mechanism = resolve(method)
    return Backend(mechanism.info.name, operators_of(attention, query, key, value, mechanism, **options))


def operators_of(call: Callable[..., Any], *given: Any, **options: Any) -> tuple[Choice, ...]:
    """What `call(*given, **options)` and its backward pass, if it has one, would run; on fake copies of tensors and states."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, dispatch.recorded(on_fake_tensors=True) as choices:
        faked: dict[int, Any] = {}

        def fake(x: Any) -> Any:
            if id(x) not in faked:
                faked[id(x)] = _fake(x, mode)
            return faked[id(x)]

        inputs = [fake(x) for x in given]
        out = call(*inputs, **{name: fake(x) for name, x in options.items()})
        out = out[0] if isinstance(out, tuple) else out
        recorded = [x for x in inputs if isinstance(x, Tensor) and needs_gradient(x)]
        if recorded and out.requires_grad:
            torch.autograd.grad(out, recorded, torch.empty_like(out), allow_unused=True)
    return tuple(dict.fromkeys(choices))


def _fake(x: Any, mode: Any) -> Any:
    """A tensor or state like `x` without numbers; anything else as it is."""
    if isinstance(x, State) and isinstance(x.tensors, Mapping):
        return derived(x, tensors={name: _fake_rows(held, mode) for name, held in x.tensors.items()})
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
        return x
    if type(x) not in (Tensor, torch.nn.Parameter):
        return mode.from_tensor(x)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)


def _fake_rows(held: Any, mode: Any) -> Any:
    if isinstance(held, GrowingTensor):
        return GrowingTensor(_fake(rows(held), mode))
    return _fake(held, mode)
