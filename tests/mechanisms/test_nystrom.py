import pytest
import torch

import subquad as sq
from subquad.engines.low_rank import pinv, segment_means, segment_members


def qkv(length, dtype=torch.float64):
    return torch.randn(3, 2, 3, length, 8, dtype=dtype).unbind(0)


def test_segments():
    real = torch.tensor([[True] * 7, [False, True, True, False, True, True, True], [False] * 4 + [True] * 2 + [False]])
    x = torch.arange(7.0).expand(3, 1, 7)[..., None]
    found = [row.float().argmax(0).masked_fill(~row.any(0), -1).tolist() for row in segment_members(real, x, 3)]
    assert found == [[0, 0, 0, 1, 1, 2, 2], [-1, 0, 0, -1, 1, 1, 2], [-1, -1, -1, -1, 0, 1, -1]]
    means = segment_means(x, segment_members(real, x, 3))[:, 0, :, 0]
    torch.testing.assert_close(means, torch.tensor([[1.0, 3.5, 5.5], [1.5, 4.5, 6.0], [4.0, 5.0, 0.0]]))


def test_pinv():
    a = torch.randn(2, 3, 8, 8, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(pinv(a, 30), torch.linalg.inv(a))
    torch.testing.assert_close(pinv(a, 30)[1, 2], pinv(a[1, 2], 30))


@pytest.mark.parametrize("length", [1, 15, 16])
@torch.no_grad()
def test_few_tokens_are_attended_to_exactly(length):
    q, k, v = qkv(length)
    torch.testing.assert_close(sq.attention(q, k, v, sq.Nystrom(landmarks=16)), sq.attention(q, k, v))


def test_rows_of_few_tokens_are_exact_beside_long_ones():
    """Which row is short is known only from the mask; each takes its own way, gradients too."""
    real = torch.tensor([[i % 4 == 1 for i in range(60)], [True] * 60])
    x, grads = [t.requires_grad_() for t in qkv(60)], []
    for method in (sq.Nystrom(landmarks=16, iterations=200), sq.Softmax()):
        out = sq.attention(*x, method, key_padding_mask=real)
        grads.append([out[0][:, real[0]], *torch.autograd.grad(out[0][:, real[0]].square().sum(), x)])
    for ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours, exact)


@torch.no_grad()
def test_more_landmarks_come_nearer_to_softmax():
    q, k, v = (torch.randn(1, 2, 256, 8, dtype=torch.float64).cumsum(2) / 8 for _ in range(3))
    exact = sq.attention(q, k, v)
    errors = [
        ((sq.attention(q, k, v, sq.Nystrom(landmarks=m, iterations=20)) - exact).norm() / exact.norm()).item()
        for m in (4, 16, 64)
    ]
    assert errors[0] > errors[1] > errors[2]


def test_what_stands_in_the_queries_of_pads_reaches_no_gradient():
    real = torch.tensor([[True] * 40 + [False] * 20, [False] * 9 + [True] * 51])
    grads = []
    for fill in (0.0, torch.nan):
        torch.manual_seed(0)
        x = [t.masked_fill(~real[:, None, :, None], fill).requires_grad_() for t in qkv(60)]
        out = sq.attention(*x, sq.Nystrom(landmarks=16), key_padding_mask=real)
        assert out.isfinite().all()
        grads.append(torch.autograd.grad(out.square().sum(), x))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@torch.no_grad()
def test_convolution_is_pytorchs():
    module = sq.Nystrom(landmarks=4, conv=5).build(heads=3, head_dim=8).double()
    q, k, v = qkv(30)
    twin = torch.nn.Conv2d(3, 3, (5, 1), padding=(2, 0), bias=False, groups=3, dtype=torch.float64)
    twin.weight.copy_(module.kernel[:, None, :, None])
    torch.testing.assert_close(module(q, k, v) - sq.attention(q, k, v, sq.Nystrom(landmarks=4)), twin(v))


def test_with_a_convolution_it_is_a_module():
    assert sq.why_not("nystrom", functional=True) == []
    (reason,) = sq.why_not(sq.Nystrom(conv=3), functional=True)
    assert "with conv it has learned kernels" in reason
    with pytest.raises(sq.UnsupportedError, match="nystrom with its default options"):
        sq.attention(*qkv(9), sq.Nystrom(conv=3))


def test_bad_options():
    with pytest.raises(sq.OptionError, match=r"Nystrom\.conv must be odd, so that a kernel has a middle; got 4"):
        sq.Nystrom(conv=4)
    with pytest.raises(sq.OptionError, match=r"Nystrom\.landmarks must be an integer of at least 1; got 0"):
        sq.Nystrom(landmarks=0)
