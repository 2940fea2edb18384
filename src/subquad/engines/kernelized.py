"""The kernelized engine: attention as sums over keys, never over pairs.

    o_i = phi(q_i) S_i / (phi(q_i) . z_i),    S_i = sum_j phi(k_j) v_j^T,    z_i = sum_j phi(k_j)

over all keys j, or over j <= i when causal. `subquad.ops.kernelized` does the computation; this module prepares its inputs.

Where features may be negative, the sums of a few keys may cancel almost completely. Up to `_FEW_KEYS` of them are weighed pair
by pair instead: numerator and denominator then have the same weights, so rounding cannot make them disagree.

B batch, H query heads, K key-value heads, G = H / K query heads per key-value head, N queries, M keys, D channels, Dv value
channels, m features.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.state_spec import StateSpec, TensorSpec
from subquad.engines.step import StateView, Step
from subquad.errors import InputError, StateError
from subquad.masks import zero_pads
from subquad.ops import dispatch, native_call
from subquad.ops.kernelized import Inputs, KernelizedRule, Sums, native, operator, pytorch, step
from subquad.ops.precision import compute_dtype, needs_gradient, upcast
from subquad.state import StateTensors

_FEW_KEYS = 32  # fewer than there are features, as a rule: weighing pairs costs no more than the sums


def attend(call: Call, rule: KernelizedRule) -> tuple[Tensor, StateTensors | None]:
    """The output (B, H, N, Dv) and, with `return_state`, the sums over all keys so far."""
    if rule.log_decay is not None and not call.is_causal:
        raise InputError("a decay acts along the sequence, so it needs is_causal=True; got is_causal=False.")
    inputs = Inputs(call.query, call.key, call.value, call.key_padding_mask, call.is_causal)
    sums: Sums = dict(call.past or {})  # type: ignore[arg-type]
    if _cancels(inputs, rule, sums):
        out = pytorch.attend_to_few(inputs, rule)
        if call.return_state:
            pytorch.attend(inputs, rule, sums)
    elif dispatch.choose(
        "kernelized",
        (*inputs[:3], *rule.feature_map.weights, *sums.values()),
        *_reasons(inputs, rule, sums, return_sums=call.return_state),
    ):
        records = needs_gradient(*inputs[:3], *rule.feature_map.weights)
        if records and rule.feature_map.projection is not None:
            inputs, rule = _project(inputs, rule)
        if call.is_donated_step and not needs_gradient(*sums.values()):
            out = step.update(inputs, rule, sums)
        else:
            out, sums = operator.attend(inputs, rule, sums, return_sums=call.return_state, needs_gradient=records)
    else:
        out, _ = pytorch.attend(inputs, rule, sums)
    return out.to(call.query.dtype), {**sums} if call.return_state else None


def state_spec(call: Call, rule: KernelizedRule) -> StateSpec:
    """The tensors of `Sums`."""
    kv_heads, dtype = call.key.shape[1], compute_dtype(call.key)
    spec = {"S": TensorSpec((kv_heads, rule.feature_map.features, call.value.shape[3] + rule.has_ones), dtype)}
    _, b = rule.feature_map.key(rule.feature_map.project(upcast(call.key[:, :, :0])))
    if b is not None:
        spec["level"] = TensorSpec((kv_heads, 1, b.shape[-1]), dtype)
    if rule.normalizer == "mean":
        spec["count"] = TensorSpec((1, 1, 1), dtype, range=(0, call.seen))
    return spec


def prepare_step(call: Call, rule: KernelizedRule) -> Step | None:
    """A step of the compiled kernel, if it has this feature map."""
    return None if rule.feature_map.native is None else _KernelizedStep(call, rule)


class _KernelizedStep(Step):
    def __init__(self, call: Call, rule: KernelizedRule) -> None:
        query, key, value = (native_call.as_rows(x) for x in (call.query, call.key, call.value))
        self._dtype, self._is_half = call.query.dtype, query.dtype != call.query.dtype
        self._shapes = native.sum_shapes(key, value, rule)
        self._run = step.Step(query, key, value, rule)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, past: StateView, seen: int, *, may_overwrite: bool
    ) -> tuple[Tensor, StateTensors, bool]:
        sums: Sums = {}
        for name, shape in self._shapes.items():
            held = past[name]
            assert isinstance(held, Tensor)
            if held.shape != shape:  # the kernel would read other memory
                raise StateError(
                    f"{name!r} of a state must have the shape {shape}; got {tuple(held.shape)}. Do not resize its tensors."
                )
            sums[name] = held if held.is_contiguous() else held.contiguous()
        if self._is_half:
            query, key, value = upcast(query), upcast(key), upcast(value)
        out, new = self._run(query, key, value, sums, in_place=may_overwrite)
        return out.to(self._dtype) if self._is_half else out, new, True


def _cancels(inputs: Inputs, rule: KernelizedRule, sums: Sums) -> bool:
    """Whether the queries see all of a few keys, and nothing else, through features that may be negative."""
    keys = inputs.key.shape[2]
    sees_all = not inputs.is_causal or keys == 1
    return rule.feature_map.is_signed and rule.has_ones and not sums and sees_all and 0 < keys <= _FEW_KEYS


def _reasons(inputs: Inputs, rule: KernelizedRule, sums: Sums, *, return_sums: bool) -> list[str]:
    """Why the operator cannot be used. It has no gradients for states, and for weights only if PyTorch applies them."""
    feature_map, reasons = rule.feature_map, []
    if feature_map.native is None:
        reasons.append("the compiled kernel does not have this feature map")
    if feature_map.projection is None and needs_gradient(*feature_map.weights):
        reasons.append("the compiled kernel has no gradients of the weights of this feature map")
    if (sums or return_sums) and needs_gradient(*inputs[:3], *feature_map.weights, *sums.values()):
        reasons.append("the compiled kernel has no gradients of decode states")
    return reasons


def _project(inputs: Inputs, rule: KernelizedRule) -> tuple[Inputs, KernelizedRule]:
    """Queries and keys projected by PyTorch, which records gradients of the weights, and the rule for what is left to do."""
    query, key = upcast(inputs.query), upcast(zero_pads(inputs.key, inputs.mask))
    groups = query.unflatten(1, (key.shape[1], -1))  # (B, K, G, n, D)
    query = rule.feature_map.project(groups.flatten(2, 3)).unflatten(2, groups.shape[2:4]).flatten(1, 2)
    projected = inputs._replace(query=query, key=rule.feature_map.project(key))
    return projected, replace(rule, feature_map=rule.feature_map.after_projection())
