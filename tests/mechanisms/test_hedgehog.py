import pytest
import torch

import subquad as sq


def test_the_projections_start_as_the_identity():
    module = sq.Hedgehog().build(heads=4, kv_heads=2, head_dim=5)
    for weight, heads in ((module.query_weight, 4), (module.key_weight, 2)):
        assert torch.equal(weight, torch.eye(5).expand(heads, 5, 5))


@torch.no_grad()
def test_a_weight_is_a_product_of_softmaxes():
    module = sq.Hedgehog().build(heads=1, head_dim=3)
    q, k = torch.tensor([0.3, -1.0, 2.0]), torch.tensor([[1.0, 0.5, -0.2], [-2.0, 0.1, 0.4]])
    out = module(q.expand(1, 1, 2, 3), k[None, None], torch.eye(2)[None, None])
    weights = k.softmax(-1) @ q.softmax(-1) + (-k).softmax(-1) @ (-q).softmax(-1)
    torch.testing.assert_close(out[0, 0, 0], weights / weights.sum())


@torch.no_grad()
@pytest.mark.parametrize("name", ["hedgehog", "t2r", "hybrid"])
def test_scale_multiplies_queries_and_keys_by_its_root(name):
    method = sq.Hybrid(window=2) if name == "hybrid" else name
    module = sq.MechanismModule(method, heads=2, head_dim=4).double()
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)
    same = {} if name != "hybrid" else {"scale": 1.0}
    torch.testing.assert_close(module(q, k, v, scale=0.25), module(q / 2, k / 2, v, **same))
    for scale in (0.0, -1.0):
        with pytest.raises(
            sq.InputError, match=f"{name} takes the square root of scale, so scale must be above 0; got {scale}"
        ):
            module(q, k, v, scale=scale)


@torch.no_grad()
def test_large_inputs_stay_finite():
    module = sq.Hedgehog().build(heads=1, head_dim=4)
    q, k, v = torch.randn(3, 1, 1, 70, 4)
    for is_causal in (False, True):
        assert module(q * 1e4, k * 1e4, v, is_causal=is_causal).isfinite().all()
