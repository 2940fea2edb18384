import torch

import subquad as sq


def test_queries_and_keys_start_with_one_map_and_live_features():
    module = sq.T2R().build(heads=4, kv_heads=2, head_dim=16)
    assert module.query_weight.shape == (4, 16, 32)
    assert torch.equal(module.query_weight, module.key_weight.repeat_interleave(2, dim=0))
    features = torch.randn(4, 1000, 16) @ module.query_weight
    assert 0.45 < (features > 0).float().mean() < 0.55
    assert (features > 0).any(-1).all()


def test_dead_features_give_zeros_and_finite_gradients():
    module = sq.T2R(features=3).build(heads=2, head_dim=4)
    with torch.no_grad():
        module.query_bias[0] = -1e3
    q, k, v = (torch.randn(1, 2, 70, 4, requires_grad=True) for _ in range(3))
    for is_causal in (False, True):
        out = module(q, k, v, is_causal=is_causal)
        assert (out[:, 0] == 0).all()
        assert (out[:, 1] != 0).any()
        for grad in torch.autograd.grad(out.sum(), [q, k, v, *module.parameters()]):
            assert grad.isfinite().all()
