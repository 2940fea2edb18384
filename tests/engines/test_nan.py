"""A NaN in a real token shows, in the same places with and without compiled kernels. Nothing else makes a NaN."""

import math
from contextlib import nullcontext

import pytest
import torch

import subquad as sq
from subquad.ops import dispatch
from tests.engines.test_native import needs_compiled
from tests.harness import CASES, every_case, inputs
from tests.kernels import has_kernels

with_kernels = pytest.mark.parametrize(
    "case", [case for case in CASES if has_kernels(case.mechanism)], ids=lambda case: case.name
)
TOKEN = 40


def rows_with_nan(case, x, is_causal):
    return case.run(x, is_causal=is_causal).isnan().any(-1)


def spoiled(case, where):
    x = inputs(97)
    if where == "query" and case.mechanism.shares_query_and_key:
        where = "key"
    getattr(x, where)[0, 1, TOKEN, 2] = torch.nan
    return x


@needs_compiled
@with_kernels
@pytest.mark.parametrize("where", ["query", "key"])
@torch.no_grad()
def test_in_a_query_or_a_key(case, where):
    x = spoiled(case, where)
    for is_causal in case.directions:
        found = rows_with_nan(case, x, is_causal)
        with dispatch.disabled():
            expected = rows_with_nan(case, x, is_causal)
        assert found[0, 1, TOKEN]
        assert torch.equal(found, expected)


@needs_compiled
@with_kernels
@torch.no_grad()
def test_in_a_value(case):
    """It may reach more rows than those that attend to the token, since 0 times NaN is NaN."""
    x, one, none = spoiled(case, "value"), inputs(97), inputs(97)
    none.value.zero_()
    one.value.zero_()[0, 1, TOKEN] = 1
    for is_causal in case.directions:
        difference = case.run(one, is_causal=is_causal) - case.run(none, is_causal=is_causal)
        sees = difference.abs().amax(-1) > 1e-9 * difference.abs().max()
        found = rows_with_nan(case, x, is_causal)
        with dispatch.disabled():
            expected = rows_with_nan(case, x, is_causal)
        assert sees.any() or case.info.name == "t2r"  # all features of a key may be 0 there
        assert found[sees].all()
        assert expected[sees].all()


def gradients(case, x, upstream, **options):
    """The output, and the gradients of queries, keys, values and parameters."""
    x = x.map(torch.Tensor.requires_grad_)
    out = case.run(x, **options)
    given = [x.query, x.key, x.value, *case.module_for(x).parameters()]
    return out.detach(), *torch.autograd.grad(out, given, upstream, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("body", [nullcontext, dispatch.disabled], ids=["compiled", "fallback"])
@pytest.mark.parametrize("content", [math.nan, math.inf], ids=str)
@every_case(key_padding_mask=True)
def test_queries_of_pads_change_no_gradient(case, content, body):
    """Their outputs have the gradient 0."""
    real = torch.ones(2, 37, dtype=torch.bool)
    real[0, :6] = real[1, 20:25] = False
    rows = real[:, None].expand(2, 3, 37)
    upstream = torch.randn(2, 3, 37, 7, dtype=torch.float64) * rows.unsqueeze(-1)
    for is_causal in case.directions:
        results = []
        for filling in (0.5, content):
            x = inputs(37)
            x.query[~rows] = filling
            with body():
                out, *grads = gradients(case, x, upstream, is_causal=is_causal, key_padding_mask=real)
            results.append([out[rows], *grads])
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_query_beside_a_pad_may_be_that_of_another_sequence():
    """As many queries as keys, in cross-attention: its NaN shows, also where gradients are recorded."""
    x, real = inputs(9), torch.arange(9).expand(2, -1) != 4
    x.query[0, 0, 4] = math.nan
    for method in ("softmax", "linear", sq.Clustered(clusters=3, topk=2)):
        for needs_grad in (False, True):
            with torch.set_grad_enabled(needs_grad):
                x.key.requires_grad_(needs_grad)
                out = sq.attention(x.query, x.key, x.value, method, key_padding_mask=real)
            assert out.isnan().any(-1).nonzero().tolist() == [[0, 0, 4]], method


@needs_compiled
@with_kernels
def test_gradients_of_other_sequences_stay(case):
    """What a kernel leaves in its scratch memory must not reach the next sequence."""
    upstream = torch.randn(2, 3, 37, 7, dtype=torch.float64)
    for is_causal in case.directions:
        clean, x = inputs(37), inputs(37)
        x.query[0] = x.key[0] = x.value[0] = math.nan
        expected, found = (gradients(case, given, upstream, is_causal=is_causal)[:4] for given in (clean, x))
        for theirs, ours in zip(expected, found, strict=True):
            assert torch.equal(theirs[1], ours[1])


@pytest.mark.parametrize("length", [1, 2, 7])
@torch.no_grad()
def test_a_query_of_few_keys_shows_its_nan(length):
    """PyTorch's fused attention makes a number of it; neither kernels nor fallbacks may."""
    query, key, value = torch.randn(3, 1, 1, length, 8).unbind(0)
    query[0, 0, -1, 0] = math.nan
    methods = (
        sq.Local(window=3),
        sq.SparseStrided(stride=3),
        sq.BigBird(block=6, random=1, globals=0),
        sq.Routing(clusters=5, chunk=8),
    )
    for method in methods:
        for is_causal in (False, True):
            for body in (nullcontext, dispatch.disabled):
                with body():
                    out = sq.attention(query, key, value, method, is_causal=is_causal)
                assert out[0, 0, -1].isnan().all(), (method, is_causal, body)
