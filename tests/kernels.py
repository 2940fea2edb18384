"""Which mechanisms have compiled kernels."""

from functools import cache
from unittest.mock import patch

import torch

from subquad.ops import dispatch
from tests.harness import Case, inputs


class _ReachedError(Exception):
    """The choice between a compiled kernel and its fallback has been reached."""


@cache
def has_kernels(mechanism):
    """Whether a call reaches the choice between a compiled kernel and its PyTorch fallback."""
    case = Case(mechanism)
    try:
        with patch.object(dispatch, "can_use_compiled", side_effect=_ReachedError):
            for is_causal in case.directions:
                for grad in (False, True):
                    with torch.set_grad_enabled(grad):
                        case.run(inputs(70, grad=grad), is_causal=is_causal)
    except _ReachedError:
        return True
    return False
