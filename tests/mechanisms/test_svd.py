import pytest
import torch

import subquad as sq
from subquad.engines.low_rank import truncate_rank
from tests.harness import assert_close


def matrix(singular, seed=0):
    """U S V^T with the given singular values."""
    generator = torch.Generator().manual_seed(seed)
    n = len(singular)
    u, v = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    return (u * torch.tensor(singular, dtype=torch.float64)) @ v


@pytest.mark.parametrize("singular", [[4, 3, 2, 1, 0.5], [4, 4, 4, 1, 1], [3, 3, 2, 0, 0], [4, 3, 3, 1, 0]])
def test_gradient_with_repeated_and_zero_singular_values(singular):
    a = matrix(singular).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: truncate_rank(a, 3), a)


@pytest.mark.parametrize("singular", [[1, 1, 1, 1, 1], [2, 1, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
def test_where_there_is_no_derivative_it_stays_small(singular):
    a = matrix(singular).requires_grad_()
    (grad,) = torch.autograd.grad(truncate_rank(a, 3).sum(), a)
    assert grad.norm() <= 2 * a.shape[-1]


def test_a_second_derivative_is_refused():
    a = matrix([4, 3, 2, 1]).requires_grad_()
    (grad,) = torch.autograd.grad(truncate_rank(a, 2).square().sum(), a, create_graph=True)
    with pytest.raises(sq.UnsupportedError, match="first derivatives only"):
        grad.sum().backward()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [3, 30])
def test_gradients_with_pads_are_those_of_the_sequence_alone(side, length):
    alone = [torch.randn(2, 3, length, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    pads = torch.randn(2, 3, 17, 5, dtype=torch.float64)
    padded = [torch.cat([pads, x] if side == "left" else [x, pads], dim=2) for x in alone]
    real = torch.cat([torch.zeros(2, 17), torch.ones(2, length)][:: 1 if side == "left" else -1], dim=1).bool()
    out = sq.attention(*padded, sq.SVD(rank=7), key_padding_mask=real)
    assert (out[:, :, ~real[0]] == 0).all()
    found = torch.autograd.grad(out.square().sum(), alone)
    expected = torch.autograd.grad(sq.attention(*alone, sq.SVD(rank=7)).square().sum(), alone)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)


@torch.no_grad()
def test_no_method_of_that_rank_is_nearer():
    """Nystrom with m landmarks is a matrix of rank m; identity values show the matrices."""
    q, k = (torch.randn(1, 2, 80, 5, dtype=torch.float64) for _ in range(2))
    eye = torch.eye(80, dtype=torch.float64).expand(1, 2, 80, 80)
    exact = sq.attention(q, k, eye)
    best = sq.attention(q, k, eye, sq.SVD(rank=16))
    singular = torch.linalg.svdvals(exact)
    torch.testing.assert_close((exact - best).square().sum((-2, -1)), singular[..., 16:].square().sum(-1))
    assert (torch.linalg.matrix_rank(best, rtol=1e-12) == 16).all()
    nystrom = sq.attention(q, k, eye, sq.Nystrom(landmarks=16))
    assert ((exact - best).norm(dim=(-2, -1)) < (exact - nystrom).norm(dim=(-2, -1))).all()


def test_the_rows_of_pads_are_exactly_zero():
    q, k, v = (torch.randn(2, 3, 30, 5, dtype=torch.float64) for _ in range(3))
    real = torch.rand(2, 30) < 0.6
    assert not sq.attention(q, k, v, sq.SVD(rank=3), key_padding_mask=real)[~real[:, None].expand(-1, 3, -1)].any()


def test_nan_in_one_sequence_is_an_answer_for_the_others():
    q, k, v = (torch.randn(2, 1, 30, 5, dtype=torch.float64) for _ in range(3))
    expected = sq.attention(q, k, v, sq.SVD(rank=3))
    q[0, 0, 4, 2] = torch.nan
    found = sq.attention(q, k, v, sq.SVD(rank=3))
    assert found[0].isnan().all()
    assert_close(found[1], expected[1])
