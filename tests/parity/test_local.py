"""Local attention beside PyTorch's own attention under the mask of the band: equal, and as accurate."""

import pytest
import torch
import torch.nn.functional as F

import subquad as sq

HEADS, DIM = 3, 16
OPTIONS = [(0, 1), (1, 1), (12, 1), (64, 1), (200, 1), (2000, 1), (5, 3), (16, 7), (3, 100)]


def band(length, window, dilation, is_causal):
    """The visible pairs: (length, length)."""
    apart = torch.arange(length)[:, None] - torch.arange(length)
    seen = (apart.abs() <= window * dilation) & (apart % dilation == 0)
    return seen & (apart >= 0) if is_causal else seen


def inputs(length, grad=False):
    return tuple(torch.randn(2, HEADS, length, DIM, requires_grad=grad) for _ in range(3))


def error(found, truth):
    return (found.double() - truth).norm()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("window", "dilation"), OPTIONS)
@pytest.mark.parametrize("length", [1, 7, 65, 300, 1000])
@torch.no_grad()
def test_as_accurate_as_a_masked_softmax(length, window, dilation, is_causal):
    x, mask = inputs(length), band(length, window, dilation, is_causal)
    truth = F.scaled_dot_product_attention(*(t.double() for t in x), attn_mask=mask)
    theirs = F.scaled_dot_product_attention(*x, attn_mask=mask)
    ours = sq.attention(*x, sq.Local(window=window, dilation=dilation), is_causal=is_causal)
    torch.testing.assert_close(ours, theirs)
    assert error(ours, truth) <= 2 * error(theirs, truth)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("window", "dilation"), [(12, 1), (5, 3)])
def test_gradients_as_accurate(window, dilation, is_causal):
    x, mask = inputs(300, grad=True), band(300, window, dilation, is_causal)

    def masked(*x):
        return F.scaled_dot_product_attention(*x, attn_mask=mask)

    def local(*x):
        return sq.attention(*x, sq.Local(window=window, dilation=dilation), is_causal=is_causal)

    def gradients(attend, x):
        return torch.autograd.grad(attend(*x).square().sum(), x)

    truth = gradients(masked, tuple(t.double() for t in x))
    for ours, theirs, exact in zip(gradients(local, x), gradients(masked, x), truth, strict=True):
        assert error(ours, exact) <= 2 * error(theirs, exact)
