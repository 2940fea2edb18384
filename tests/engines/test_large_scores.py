"""Which pairs are masked does not depend on how large scores are: compiled kernels and PyTorch fallbacks."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import subquad as sq
from subquad.ops import dispatch, tiles
from subquad.ops.tiles import Tile, TileGroup, one_tile
from subquad.testing import assert_close, inputs
from tests.harness import CASES, every_case

PATTERNS = [
    sq.Local(window=4),
    sq.Local(window=3, dilation=4),
    sq.SparseStrided(stride=7),
    sq.SparseFixed(stride=8, summary=2),
    sq.Longformer(window=4, num_global=2),
    sq.BigBird(block=8),
]
both_bodies = pytest.mark.parametrize("body", [nullcontext, dispatch.disabled], ids=["compiled", "fallback"])
both_directions = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
# The factors on all queries and on one key. Their scores are far above -1e30, or overflow.
huge = pytest.mark.parametrize(("of_queries", "of_key"), [(1e12, 1e20), (1e25, 1e25)], ids=["finite", "overflowing"])


def large(length, of_queries, of_key, key):
    x = inputs(length, dtype=torch.float32, dim=8)
    x.query.mul_(of_queries)
    x.key[:, :, key] *= of_key
    return x


@both_bodies
@huge
@every_case(is_causal=True)
@torch.no_grad()
def test_a_later_key_is_not_seen(case, body, of_queries, of_key):
    x = large(97, of_queries, of_key, key=40)
    with body():
        found, expected = (case.run(given, is_causal=True) for given in (x, x.tokens(40)))
    torch.testing.assert_close(found[:, :, :40], expected, equal_nan=True)


@both_bodies
@huge
@every_case(is_causal=True, key_padding_mask=True)
@torch.no_grad()
def test_a_later_key_is_not_seen_behind_pads(case, body, of_queries, of_key):
    """Some engines mask causality and pads in another way than causality alone."""
    x = large(97, of_queries, of_key, key=40)
    real = torch.ones(2, 97, dtype=torch.bool)
    real[0, :5] = real[1, 11:14] = False
    with body():
        found = case.run(x, is_causal=True, key_padding_mask=real)
        expected = case.run(x.tokens(40), is_causal=True, key_padding_mask=real[:, :40])
    torch.testing.assert_close(found[:, :, :40], expected, equal_nan=True)


def scores(case):
    """Whether the mechanism masks scores of queries and keys, with weights that do not depend on the dtype."""
    return case.info.engine in ("dense", "block_sparse", "bucketed", "clustered") and not dict(case.build().named_parameters())


@both_bodies
@pytest.mark.parametrize("case", [c for c in CASES if scores(c) and not c.why_not(decode=True)], ids=lambda case: case.name)
@torch.no_grad()
def test_a_state_with_a_large_key(case, body):
    x = large(60, 1e12, 1e20, key=20)
    with body():
        expected = case.run(x, is_causal=True)
        _, state = case.run(x.tokens(40), is_causal=True, return_state=True)
        found, _ = case.run(x.tokens(40, 60), is_causal=True, state=state, return_state=True)
    torch.testing.assert_close(found, expected[:, :, 40:])


@both_bodies
@both_directions
@huge
@pytest.mark.parametrize("mechanism", PATTERNS, ids=str)
@torch.no_grad()
def test_a_key_outside_the_pattern_is_not_seen(mechanism, body, is_causal, of_queries, of_key):
    x = large(97, of_queries, of_key, key=40)
    one = torch.zeros_like(x.value)
    one[:, :, 40] = 1
    with body():
        sees = sq.attention(x.query / of_queries, x.key.clamp(-1, 1), one, mechanism, is_causal=is_causal)[..., 0] != 0
        found = sq.attention(x.query, x.key, x.value, mechanism, is_causal=is_causal)
        decoded = decode(x, mechanism, 43) if is_causal else found
        x.key[:, :, 40] = 0
        expected = sq.attention(x.query, x.key, x.value, mechanism, is_causal=is_causal)
    assert sees.any()
    assert not sees.all()
    assert torch.equal(found[~sees], expected[~sees])
    assert torch.equal(decoded[~sees], expected[~sees])


def decode(x, mechanism, first):
    """Two pieces, the first of which leaves the large key in the state."""
    out, state = sq.attention(*list(x.tokens(first))[:3], mechanism, is_causal=True, return_state=True)
    return torch.cat([out, sq.attention(*list(x.tokens(first, 97))[:3], mechanism, is_causal=True, state=state)], dim=2)


@both_bodies
@pytest.mark.parametrize(("of_queries", "of_keys"), [(2e16, -2e16), (2e18, -2e18), (2e18, 2e18)])
@pytest.mark.parametrize("case", [case for case in CASES if scores(case)], ids=lambda case: case.name)
@torch.no_grad()
def test_scores_up_to_the_range_of_the_dtype(case, body, of_queries, of_keys):
    """All of one sign, 4e32 or near 1e38: with 0 or -1e30 in place of masked ones, all others would seem masked, or none."""
    x = inputs(37, dtype=torch.float32, dim=8).map(lambda t: t.abs() + 0.1)
    if not case.mechanism.shares_query_and_key:
        x = replace(x, query=x.query * of_queries, key=x.key * of_keys)
    exact = x.map(torch.Tensor.double)
    for is_causal in case.directions:
        for options in ({}, {"key_padding_mask": torch.arange(37).expand(2, -1) % 5 > 0}):
            if options and case.why_not(key_padding_mask=True):
                continue
            with body():
                found = case.run(x, is_causal=is_causal, **options)
            assert_close(found.double(), case.reference(exact, is_causal=is_causal, **options), 1e-6)


@both_bodies
@both_directions
@torch.no_grad()
def test_exponents_down_to_the_range_of_the_dtype(body, is_causal):
    """The keys of `efficient` are exponents."""
    x = inputs(70, dtype=torch.float32)
    x.key.abs_().add_(1).mul_(-5e37)
    case = next(case for case in CASES if case.info.name == "efficient")
    with body():
        found = case.run(x, is_causal=is_causal)
    assert_close(found.double(), case.reference(x.map(torch.Tensor.double), is_causal=is_causal), 1e-6)


@both_bodies
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "mechanism",
    [*PATTERNS, sq.Pooled(stride=6, window=5), sq.Routing(clusters=2, chunk=8), sq.Clustered(clusters=3, topk=2)],
    ids=str,
)
def test_equal_large_scores_have_equal_weights(mechanism, dtype, body):
    """A log-sum-exp of 1e30 has no room for the number of keys, which counts where sets of keys are merged and in gradients."""
    q, k = (torch.full((1, 2, 50, 8), 1e15, dtype=dtype) for _ in range(2))
    v = torch.randn(1, 2, 50, 3, dtype=dtype, requires_grad=True)
    small = v.detach().requires_grad_()
    with body():
        out, expected = sq.attention(q, k, v, mechanism), sq.attention(q / 1e15, k / 1e15, small, mechanism)
    weights = torch.randn_like(out)
    (found,), (right,) = torch.autograd.grad(out, v, weights), torch.autograd.grad(expected, small, weights)
    assert_close(out, expected, 1e-5)
    assert_close(found, right, 1e-5)


@pytest.mark.parametrize("kernel", ["compiled", "fused", "plain"])
def test_a_set_of_no_keys_beside_one_with_a_small_score(kernel, monkeypatch):
    """PyTorch's fused kernel gives the former a log-sum-exp of 0, as if it had a key with the score 0."""
    body = nullcontext if kernel == "compiled" else dispatch.disabled
    if kernel == "plain":
        monkeypatch.setattr(one_tile, "_has_fused_kernel", lambda query, key: False)
    q, k, v = (torch.ones(1, 1, *n, 4) for n in ((1, 2), (3,), (3,)))
    mask = torch.tensor([[0.0, 0.0, 0.0], [-math.inf] * 3])[None, None]
    bias = torch.full((1, 1, 3), -math.inf)
    low = TileGroup(q, k * -30, v * 7, [Tile(0, 2, 1, 0, 0, 3)])
    with body():
        masked, _ = tiles.attend([TileGroup(q, k, v, [Tile(0, 2, 1, 0, 0, 3, mask)]), low], 2, 1.0)
        biased, _ = tiles.attend([TileGroup(q, k, v, [Tile(0, 2, 1, 0, 0, 3)], bias=bias), low], 2, 1.0)
        causal, _ = tiles.attend([TileGroup(q, k, v, [Tile(0, 2, 1, 0, 0, 2, is_causal=True)], bias=bias), low], 2, 1.0)
        both, _ = tiles.attend([TileGroup(q, k, v, [Tile(0, 2, 1, 0, 0, 3, mask)], bias=bias), low], 2, 1.0)
    assert masked[0, :, 0].tolist() == pytest.approx([1, 7], rel=1e-5)
    assert all(out[0, :, 0].tolist() == pytest.approx([7, 7], rel=1e-5) for out in (biased, causal, both))


@both_bodies
@every_case(key_padding_mask=True)
def test_no_nan_appears_on_the_way_back(case, body):
    """Neither in rows that see nothing nor anywhere else: anomaly detection looks at every intermediate gradient."""
    x = inputs(70, grad=True)
    real = torch.arange(70) > torch.tensor([[30], [80]])
    for is_causal in case.directions:
        with body(), torch.autograd.set_detect_anomaly(True):
            out = case.run(x, is_causal=is_causal, key_padding_mask=real)
            grads = torch.autograd.grad(
                out.square().sum(), [x.query, x.key, x.value], allow_unused=True, materialize_grads=True
            )
        assert all(g.isfinite().all() for g in (out, *grads))


@both_bodies
@pytest.mark.parametrize("mechanism", [sq.SparseFixed(stride=64), sq.Local(window=4), sq.SparseStrided(stride=7)], ids=str)
def test_gradients_of_scores_that_cannot_be_counted(mechanism, body):
    """Their rounding error is far above 1, and one weight is 1."""
    x = large(15, 1e30, 1.0, key=0)
    value = x.value.detach().requires_grad_()
    exact = value.detach().double().requires_grad_()
    with body():
        out = sq.attention(x.query, x.key, value, mechanism)
    expected = sq.reference.attention(mechanism, x.query.double(), x.key.double(), exact)
    upstream = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, value, upstream)
    (right,) = torch.autograd.grad(expected, exact, upstream.double())
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
