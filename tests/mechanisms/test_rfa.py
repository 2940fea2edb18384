import torch

import subquad as sq
from subquad.engines.call import Call
from subquad.engines.kernelized import attend
from subquad.ops.feature_map import FeatureMap
from subquad.ops.kernelized import KernelizedRule
from subquad.reference.rfa import phi


def test_gate_starts_by_keeping_most_of_the_past():
    module = sq.RFA(gated=True).build(heads=2, head_dim=4, dim=3)
    assert (module.gate_bias.sigmoid() > 0.8).all()


@torch.no_grad()
def test_the_floor_keeps_the_sign():
    rule = KernelizedRule(feature_map=FeatureMap.symmetric(lambda x: x, 1), normalizer="signed", floor=0.5)
    q, one = torch.tensor([2.0, 0.1, -0.1, -2.0]).reshape(1, 1, 4, 1), torch.ones(1, 1, 1, 1)
    out, _ = attend(Call(query=q, key=one, value=one), rule)
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 0.2, 0.2, 1.0]))


@torch.no_grad()
def test_no_sum_below_the_floor_is_divided_by():
    module = sq.RFA(floor=1.0).build(heads=1, head_dim=4)
    q, k, v = torch.randn(3, 1, 1, 1, 4)
    torch.testing.assert_close(module(q, q, v), v)
    fq, fk = (phi(x, module.projection.unsqueeze(0)) for x in (q, k))
    torch.testing.assert_close(module(q, k, v), (fq @ fk.mT).abs() * v)
