"""Decode steps of one token per sequence, prepared: what depends on shapes, precision and options is worked out once.

The first step of a sequence is checked like any call. The state that it returns keeps the `PreparedStep`, and the next call
uses it if its arguments are alike. In all other calls the state is continued as usual.

B batch, H query heads, K key-value heads, D channels, Dv value channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

from subquad.engines.call import Call
from subquad.growing_tensor import GrowingTensor
from subquad.ops import dispatch
from subquad.ops.precision import needs_gradient
from subquad.state import (
    State,
    StateTensors,
    continued,
    is_donated,
    may_overwrite,
    prepared_step,
    require_usable,
    rows,
    take_memory,
)

StateView = Mapping[str, Tensor | GrowingTensor]


class Step(ABC):
    """What an engine does in a step without masks or gradients, on a CPU with compiled kernels."""

    @abstractmethod
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, past: StateView, seen: int, *, may_overwrite: bool
    ) -> tuple[Tensor, StateTensors, bool]:
        """The output (B, H, 1, Dv), the tensors of the new state, and whether no other state shares their memory.

        Args:
            query, key, value: (B, H, 1, D), (B, K, 1, D) and (B, K, 1, Dv), with the shapes and strides that it was made for.
            past: the tensors of the state.
            seen: the number of tokens before, pads included.
            may_overwrite: `past` comes from this step, and nobody else reads it.
        """


class PreparedStep:
    """A step of a mechanism, and which calls can use it."""

    def __init__(self, step: Step, mechanism: object, call: Call, *, is_functional: bool) -> None:
        self._step = step
        self._mechanism = mechanism
        self._scale = call.scale
        self._is_functional = is_functional
        self._weights = [] if is_functional else [(name, x, x._version) for name, x in call.weights.items()]
        self._trains = any(x.requires_grad for x in call.weights.values())
        self._layout = _layout(call.query, call.key, call.value)
        self._is_grouped = call.query.shape[1] != call.key.shape[1]
        self._is_shared = call.query is call.key

    def takes(
        self,
        mechanism: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: object,
        weights: Mapping[str, Tensor | None] | None,
        *,
        enable_gqa: object = True,
    ) -> bool:
        """Whether a call with these arguments is like the one that was checked; `weights` is None for a plain function."""
        if mechanism is not self._mechanism or (weights is None) is not self._is_functional:
            return False
        if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor or not _is_plain_call():
            return False
        if (query is key) is not self._is_shared or _layout(query, key, value) != self._layout:
            return False
        if query.is_neg() or key.is_neg() or value.is_neg():
            return False
        if torch.is_grad_enabled() and (self._trains or query.requires_grad or key.requires_grad or value.requires_grad):
            return False
        if enable_gqa is not True and (self._is_grouped or enable_gqa is not False):
            return False
        if scale is not self._scale and (type(scale) is not float or scale != self._scale):
            return False
        return weights is None or all(weights.get(name) is x and x._version == v for name, x, v in self._weights)

    def run(self, state: State, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, State]:
        """The output (B, H, 1, Dv), and the new state."""
        past, overwrite = state.tensors, may_overwrite(state)
        if is_donated(state):
            take_memory(state)
        else:
            require_usable(state)
        out, tensors, is_exclusive = self._step(query, key, value, past, state.length, may_overwrite=overwrite)
        return out, continued(state, tensors, step=self, is_exclusive=is_exclusive)


def find(state: object) -> PreparedStep | None:
    """The step that a state was made by, if a call may use it."""
    if state is None or torch.compiler.is_compiling() or not isinstance(state, State):
        return None
    found = prepared_step(state)
    return found if isinstance(found, PreparedStep) else None


def is_step(call: Call) -> bool:
    """Whether a checked call may be a prepared step: one token for each sequence, no masks, no gradients."""
    if torch.compiler.is_compiling():  # which sees a constant in the weights of a plain function
        return False
    tensors = (call.query, call.key, call.value, *call.weights.values())
    if call.state is None or not call.return_state or call.query.shape[2] != 1 or not call.query.numel():
        return False
    if call.key_padding_mask is not None or call.attn_mask is not None or call.global_mask is not None or call.dropout_p:
        return False
    if call.hidden is not None or not _is_plain_call():
        return False
    held = [rows(x) for x in call.state.tensors.values()]
    has_adjacent_channels = all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in tensors[:3])
    return (
        has_adjacent_channels
        and dispatch.can_use_compiled(*tensors, *held)
        and not needs_gradient(*tensors, *held)
        and not any(x.is_inference() for x in call.weights.values())  # whose changes cannot be noticed
    )


def _is_plain_call() -> bool:
    """Whether kernels may run: nothing traces, transforms, casts or records what happens here."""
    return (
        dispatch.has_kernels()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not torch._C._is_tracing()
        and not torch.is_autocast_enabled("cpu")
        and not dispatch.is_recording()
    )


def _layout(query: Tensor, key: Tensor, value: Tensor) -> tuple[object, ...]:
    return (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
        query.dtype, key.dtype, value.dtype, query.is_cpu, key.is_cpu, value.is_cpu,
    )  # fmt: skip
