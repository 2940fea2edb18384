"""Nothing of size N x N, gradients included."""

import pytest
import torch

import subquad as sq
from tests.harness import Largest

N, DIM = 32_768, 16


@pytest.mark.parametrize("config", [sq.Linformer(max_length=N), sq.Nystrom(), sq.Nystrom(conv=33), sq.Induced()], ids=repr)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_largest_tensor_is_linear_in_the_length(config, padded, grad):
    module = config.build(heads=1, head_dim=DIM)
    x = [torch.randn(1, 1, N, DIM, requires_grad=grad) for _ in range(3)]
    real = torch.arange(N)[None] < 20_000 if padded else None
    with Largest() as largest, torch.set_grad_enabled(grad):
        out = module(*x, key_padding_mask=real)
        if grad:
            out.sum().backward()
    summaries = getattr(config, "rank", 64)
    assert largest.numel <= N * summaries
