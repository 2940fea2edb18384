"""Which mechanisms have compiled kernels, and calls of any of them as a function."""

from functools import cache
from unittest.mock import patch

import torch

import subquad as sq
from subquad.ops import dispatch, native_library
from tests.harness import Case, inputs


class _ReachedError(Exception):
    """The choice between a compiled kernel and its fallback has been reached."""


@cache
def has_kernels(mechanism):
    """Whether a call reaches the choice between a compiled kernel and its PyTorch fallback."""
    case = Case(mechanism)
    try:
        # Inside `can_use_compiled`, which engines may have imported by name.
        with patch.object(dispatch, "_is_enabled", True), patch.object(native_library, "load", side_effect=_ReachedError):
            for is_causal in case.directions:
                for grad in (False, True):
                    with torch.set_grad_enabled(grad):
                        case.run(inputs(70, grad=grad), is_causal=is_causal)
    except _ReachedError:
        return True
    return False


def attention(query, key, value, mechanism, *, enable_gqa=False, **call):
    """`subquad.attention`, of mechanisms with parameters too; these are drawn, and get no gradients."""
    if not mechanism.reasons(["functional"]):
        return sq.attention(query, key, value, mechanism, enable_gqa=enable_gqa, **call)
    sizes = {"heads": query.shape[1], "kv_heads": key.shape[1], "head_dim": query.shape[3], "value_dim": value.shape[3]}
    return built(mechanism, **sizes).to(torch.promote_types(query.dtype, torch.float32))(query, key, value, **call)


def built(mechanism, **sizes):
    """A module in float64 with drawn parameters, which get no gradients."""
    module = mechanism.build(**sizes).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(6)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    return module
