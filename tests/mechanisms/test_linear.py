import torch

import subquad as sq


@torch.no_grad()
def test_small_features_do_not_round_to_0():
    q, k, v = torch.randn(3, 1, 1, 20, 4).unbind(0)
    k = k - 30
    truth = sq.attention(q.double(), k.double(), v.double(), "linear")
    torch.testing.assert_close(sq.attention(q, k, v, "linear").double(), truth, rtol=1e-4, atol=1e-5)
