import pytest
import torch

import subquad as sq
from subquad import reference


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scale_of_zero_or_less(scale, is_causal):
    """PyTorch's fused causal kernel alone gives NaN here."""
    q, k, v = torch.randn(3, 1, 2, 70, 8, dtype=torch.float64).unbind(0)
    expected = reference.attention(sq.Softmax(), q, k, v, is_causal=is_causal, scale=scale)
    torch.testing.assert_close(sq.attention(q, k, v, is_causal=is_causal, scale=scale), expected)
