"""No tensor of size N x N, gradients included; the same results with and without compiled kernels."""

import pytest
import torch

import subquad as sq
from subquad.engines import low_rank
from tests.harness import Largest

N, DIM = 32_768, 16


@pytest.mark.parametrize("mechanism", [sq.Linformer(max_length=N), sq.Nystrom(), sq.Nystrom(conv=33), sq.Induced()], ids=repr)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_largest_tensor_is_linear_in_the_length(mechanism, padded, grad):
    module = mechanism.build(heads=1, head_dim=DIM)
    x = [torch.randn(1, 1, N, DIM, requires_grad=grad) for _ in range(3)]
    real = torch.arange(N)[None] < 20_000 if padded else None
    with Largest() as largest, torch.set_grad_enabled(grad):
        out = module(*x, key_padding_mask=real)
        if grad:
            out.sum().backward()
    summaries = getattr(mechanism, "rank", 64)
    assert largest.numel <= N * summaries


@pytest.mark.parametrize("masked", [False, True])
def test_the_compiled_kernel_attends_as_pytorch_does(monkeypatch, masked):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, n, d, dtype=torch.float64) for h, n, d in ((6, 17, 5), (3, 29, 5), (3, 29, 7)))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    mask = torch.arange(29) < torch.tensor([[0], [11]]) if masked else None
    grad, found = torch.randn(2, 6, 17, 7, dtype=torch.float64), []
    for least in (2**60, 0):
        monkeypatch.setattr(low_rank, "_LARGE", least)
        out = low_rank.attend(*leaves, mask, 0.3)
        found.append((out, *torch.autograd.grad(out, leaves, grad)))
    for pytorch, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, pytorch, atol=1e-12, rtol=1e-10)
