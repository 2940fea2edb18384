"""Which mechanisms have compiled kernels."""

from functools import cache
from unittest.mock import patch

import torch

from subquad.ops import dispatch, native_call, native_library
from tests.harness import Case, inputs


class _ReachedError(Exception):
    """A compiled kernel would be called now."""


@cache
def has_kernels(mechanism):
    """Whether it calls a compiled kernel, or would, if these were built and turned on."""
    case = Case(mechanism)
    with (
        patch.object(dispatch, "_is_enabled", True),
        patch.object(native_library, "load", lambda: True),
        patch.object(native_call, "call", side_effect=_ReachedError),
    ):
        for is_causal in case.directions:
            for grad in (False, True):
                try:
                    with torch.set_grad_enabled(grad):
                        case.run(inputs(70, grad=grad), is_causal=is_causal)
                except _ReachedError:
                    return True
    return False
