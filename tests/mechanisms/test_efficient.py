import pytest
import torch

import subquad as sq


@pytest.mark.parametrize("rise", [50.0, 100.0, 150.0, 1000.0])
@torch.no_grad()
def test_early_keys_of_a_chunk_do_not_vanish_in_float32(rise):
    q, k, v = torch.randn(3, 1, 1, 64, 4).unbind(0)
    k[:, :, 40:] += rise
    truth = sq.attention(q.double(), k.double(), v.double(), "efficient", is_causal=True)
    found = sq.attention(q, k, v, "efficient", is_causal=True)
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-5)
