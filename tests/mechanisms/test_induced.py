import torch

import subquad as sq


@torch.no_grad()
def test_the_order_of_tokens_does_not_matter():
    """Set Transformer's property: permuting the keys changes nothing, permuting the queries permutes the output."""
    module = sq.Induced(points=4).build(heads=3, head_dim=5).double()
    q, k, v = torch.randn(3, 2, 3, 30, 5, dtype=torch.float64).unbind(0)
    order = torch.randperm(30)
    out = module(q, k, v)
    torch.testing.assert_close(module(q, k[:, :, order], v[:, :, order]), out)
    torch.testing.assert_close(module(q[:, :, order], k, v), out[:, :, order])


@torch.no_grad()
def test_one_point_gives_all_queries_the_same():
    module = sq.Induced(points=1).build(heads=3, head_dim=5).double()
    q, k, v = torch.randn(3, 2, 3, 30, 5, dtype=torch.float64).unbind(0)
    expected = sq.attention(module.points.expand(2, 3, 1, 5), k, v)
    torch.testing.assert_close(module(q, k, v), expected.expand(2, 3, 30, 5))


def test_points_belong_to_the_key_value_heads():
    module = sq.Induced(points=4).build(heads=6, kv_heads=2, head_dim=5)
    assert module.points.shape == (2, 4, 5)
