"""Which mechanisms have compiled kernels."""

from functools import cache
from unittest.mock import patch

import torch

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
