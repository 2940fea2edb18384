"""Hashing: one tensor for queries and keys, which tokens attend to each other, and a token that is alone."""

import pytest
import torch

import subquad as sq
from tests.harness import Case, assert_close, inputs


def weights(x, mechanism, *, is_causal=False):
    """The attention weights (H, N, N) of x (1, H, N, D), read off an output whose values are the identity."""
    identity = torch.eye(x.shape[2], dtype=x.dtype).expand(1, x.shape[1], -1, -1)
    return sq.attention(x, x, identity, mechanism, is_causal=is_causal)[0]


def test_two_tensors_are_refused():
    x = inputs(9)
    with pytest.raises(sq.InputError, match=r"attention\(qk, qk, v, 'reformer'\), or set shared_qk=False"):
        sq.attention(x.query, x.key, x.value, "reformer")
    assert sq.attention(x.query, x.query, x.value, "reformer").shape == x.value.shape
    assert sq.attention(x.query, x.key, x.value, sq.Reformer(shared_qk=False)).shape == x.value.shape


def test_a_layer_has_one_projection_for_both():
    layer = sq.Attention(16, 4, "reformer")
    assert not any(name.startswith("k_proj") for name in layer.state_dict())
    assert layer(torch.randn(2, 30, 16)).shape == (2, 30, 16)
    for is_causal in (False, True):
        with pytest.raises(sq.UnsupportedError, match="cross-attention"):
            layer(torch.randn(2, 30, 16), torch.randn(2, 30, 16), is_causal=is_causal)
    with pytest.raises(sq.UnsupportedError, match="the same heads"):
        sq.Attention(16, 4, "reformer", kv_heads=2)


def test_odd_buckets_are_refused():
    with pytest.raises(sq.OptionError, match="even"):
        sq.Reformer(buckets=7)


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_a_pair_met_in_several_rounds_counts_once(is_causal):
    """Two hashes and chunks of everything: a pair is seen if any round hashes it alike, with the weight that softmax gives it."""
    x = torch.randn(1, 2, 40, 6, dtype=torch.float64)
    mechanism = sq.Reformer(buckets=2, chunk=40, rounds=5)
    rotations = mechanism.build(heads=2, head_dim=6).double().rotations  # (H, R, 1, D)
    side = torch.einsum("bhnd,hrcd->hrn", x, rotations) < 0
    alike = (side[..., :, None] == side[..., None, :]).any(1) & ~torch.eye(40, dtype=torch.bool)
    if is_causal:
        alike = alike.tril()
    alone = ~alike.any(-1, keepdim=True) & torch.eye(40, dtype=torch.bool)
    scores = (x @ torch.nn.functional.normalize(x, dim=-1).mT)[0]
    expected = scores.masked_fill(~(alike | alone), -torch.inf).softmax(-1)
    assert_close(weights(x, mechanism, is_causal=is_causal), expected)


@torch.no_grad()
def test_a_token_that_sees_no_other_sees_itself():
    x = torch.randn(1, 1, 1, 4, dtype=torch.float64)
    assert weights(x, sq.Reformer()) == 1
    opposite = torch.cat([x, -x], dim=2)  # in every round they fall into opposite buckets
    assert torch.equal(weights(opposite, sq.Reformer())[0], torch.eye(2, dtype=torch.float64))
    first = weights(torch.randn(1, 3, 9, 4, dtype=torch.float64), sq.Reformer(), is_causal=True)[:, 0]
    assert torch.equal(first, torch.eye(9, dtype=torch.float64)[:1].expand(3, -1))


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_tokens_of_one_bucket_are_exact_softmax(is_causal):
    x = inputs(50)
    direction = torch.randn(5, dtype=torch.float64)
    x = type(x)(x.query * 1e-3 + direction, x.key * 1e-3 + direction, x.value, x.hidden)
    found = Case(sq.Reformer(shared_qk=False, chunk=50)).run(x, is_causal=is_causal)
    assert_close(found, Case(sq.Softmax()).run(x, is_causal=is_causal))


@torch.no_grad()
def test_a_causal_query_sees_the_last_tokens_of_its_bucket():
    x = (torch.randn(1, 1, 1, 6) + torch.randn(1, 1, 30, 6) * 1e-3).double()
    seen = weights(x, sq.Reformer(buckets=4, chunk=5, rounds=1), is_causal=True)[0] != 0
    i, j = torch.arange(30)[:, None], torch.arange(30)
    expected = (j < i) & (j >= i - 5)
    expected[0, 0] = True
    assert torch.equal(seen, expected)
