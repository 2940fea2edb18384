"""Segments: what they are the means of, and when a causal query sees them."""

import pytest
import torch

import subquad as sq


def weights(mechanism, length, *, is_causal=False, **options):
    """The attention weights (N, N), read off an output whose values are the identity."""
    q, k = (torch.randn(1, 1, length, 8, dtype=torch.float64) for _ in range(2))
    identity = torch.eye(length, dtype=torch.float64)[None, None]
    return sq.attention(q, k, identity, mechanism, is_causal=is_causal, **options)[0, 0]


def test_segments_of_one_token_beside_the_own_key():
    """Every key once, and the own key once more."""
    torch.manual_seed(0)
    found = weights(sq.Pooled(stride=1, window=0), 12)
    torch.manual_seed(0)
    exact = weights("softmax", 12)
    expected = exact + torch.diag(exact.diag())
    torch.testing.assert_close(found, expected / expected.sum(-1, keepdim=True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_tokens_of_a_segment_weigh_alike_outside_the_window(is_causal):
    found = weights(sq.Pooled(stride=5, window=0), 40, is_causal=is_causal)
    torch.testing.assert_close(found.sum(-1), torch.ones(40, dtype=torch.float64))
    others = found.masked_fill(torch.eye(40, dtype=torch.bool), torch.nan).unflatten(-1, (8, 5))
    spread = others.nan_to_num(-1).amax(-1) - others.nan_to_num(2).amin(-1)
    assert spread.abs().max() < 1e-12


def test_a_causal_query_sees_no_segment_before_it_has_ended():
    seen = weights(sq.Pooled(stride=5, window=0), 40, is_causal=True) != 0
    i, j = torch.arange(40)[:, None], torch.arange(40)
    assert torch.equal(seen, (j // 5 < i // 5) | (i == j))


def test_an_incomplete_segment_is_the_mean_of_what_is_there():
    found = weights(sq.Pooled(stride=5, window=0), 7)
    assert (found[0, 5] == found[0, 6]) & (found[0, 5] > 0)
    torch.testing.assert_close(found.sum(-1), torch.ones(7, dtype=torch.float64))


@torch.no_grad()
def test_the_state_keeps_one_row_a_segment():
    x = torch.randn(1, 1, 4000, 8)
    _, state = sq.attention(x, x, x, sq.Pooled(stride=50, window=10), is_causal=True, return_state=True)
    for t in range(200):
        one = x[:, :, t : t + 1]
        _, state = sq.attention(one, one, one, sq.Pooled(stride=50, window=10), is_causal=True, state=state, return_state=True)
    tokens, segments = (state.tensors[name].rows.shape[2] for name in ("key", "segment_key"))
    assert tokens < 2 * 64 + 1
    assert 84 <= segments < 2 * 84 + 1
