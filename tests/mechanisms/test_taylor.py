import pytest
import torch

import subquad as sq
from subquad.ops.feature_map import unit_vectors


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_unit_vectors_of_any_size(size):
    x = torch.randn(5, 7)
    torch.testing.assert_close(unit_vectors(x * size), unit_vectors(x))
    assert (unit_vectors(torch.zeros(2, 3)) == 0).all()


def test_the_gradient_at_a_zero_vector_is_zero():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(unit_vectors(x).sum(), x)
    assert grad[0].tolist() == [0, 0]
    assert grad[1].abs().sum() > 0


@pytest.mark.parametrize("state", [False, True], ids=["", "with a state"])
@pytest.mark.parametrize("queries", [1, 3])
def test_the_value_of_the_only_key_is_the_output(queries, state):
    """However small its weight is: here about 1e-7, the rounding of the cosine."""
    q = torch.tensor([[0.3, 0.7], [0.30001, 0.7], [0.3, 0.70001]])[None, None, :queries]
    k, v = -q[:, :, :1], torch.tensor([[3.0, 5.0]])[None, None]
    k[..., 0] += 1e-4
    v.requires_grad_()
    if state:
        q = q[:, :, :1]
        out, _ = sq.attention(q, k, v, "taylor", is_causal=True, return_state=True)
    else:
        out = sq.attention(q, k, v, "taylor")
    torch.testing.assert_close(out, v.expand_as(out), rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(grad, torch.full_like(v, q.shape[2]), rtol=1e-6, atol=0)
