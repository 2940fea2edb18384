"""The compiled kernels of the clustered engine against its PyTorch fallback."""

import pytest
import torch

import subquad as sq
from subquad.ops import dispatch
from subquad.ops.clustered import operator
from tests.engines.test_native import assert_same, needs_compiled, results, tensors, without_compiled

pytestmark = needs_compiled


@pytest.fixture(params=[1, 2, 5], ids=lambda n: f"{n} threads")
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def padding(length, *shares):
    real = torch.rand(len(shares), length, generator=torch.Generator().manual_seed(1))
    return real < torch.tensor(shares).unsqueeze(-1)


def assert_same_clusters(x, real, clusters, iterations):
    found = operator.ASSIGN(x, real, clusters, iterations)
    with dispatch.disabled():
        assert torch.equal(found, operator.ASSIGN(x, real, clusters, iterations))


@pytest.mark.parametrize("bits", [1, 7, 8, 31, 32, 63, 64, 65, 130])
@pytest.mark.parametrize(("length", "clusters"), [(1, 1), (40, 40), (257, 3), (600, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_k_means(bits, length, clusters, dtype):
    x = torch.randn(2, 3, length, bits, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for iterations in (1, 6):
        assert_same_clusters(x, None, clusters, iterations)
        assert_same_clusters(x, padding(length, 0.7, 0.0), clusters, iterations)  # nobody is real
        assert_same_clusters(x, padding(length, 0.02, 1.0), clusters, iterations)  # fewer real ones than clusters


@pytest.mark.parametrize("heads", [1, 3, 6])
def test_k_means_on_threads(threads, heads):
    x = torch.randn(1, heads, 1500, 32, generator=torch.Generator().manual_seed(0))
    for real in (None, padding(1500, 0.6)):
        assert_same_clusters(x, real, 50, 5)


def test_k_means_among_ties():
    """Codes of 3 bits: most distances are equal, sums are 0, and clusters are empty."""
    x = torch.randn(2, 3, 500, 3, generator=torch.Generator().manual_seed(0)).round()
    x[0, 0] = 1.0
    x[0, 1] = torch.nan  # its sign is taken to be negative
    x[0, 2, ::2] *= -0.0
    for clusters in (2, 20, 300):
        assert_same_clusters(x, None, clusters, 4)
        assert_same_clusters(x, padding(500, 0.5, 0.1), clusters, 4)


def test_k_means_of_any_strides():
    x = torch.randn(2, 90, 3, 20, generator=torch.Generator().manual_seed(0))
    assert_same_clusters(x.transpose(1, 2), None, 7, 3)
    assert_same_clusters(x.permute(0, 2, 3, 1), None, 7, 3)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("has_pads", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("queries", "keys", "clusters", "topk"),
    [
        (1, 1, 100, 32),
        (70, 70, 5, 0),
        (70, 70, 100, 4),
        (300, 300, 7, 16),
        (90, 400, 20, 9),
        (400, 20, 3, 32),
        (33, 1300, 40, 32),
    ],
)
def test_outputs_and_gradients(queries, keys, clusters, topk, kv_heads, has_pads):
    given = tensors(queries, keys, kv_heads=kv_heads)
    call = {"enable_gqa": kv_heads != 4, "scale": 0.7}
    if has_pads:
        call["key_padding_mask"] = padding(keys, 0.6, 0.05)
    mechanism = sq.Clustered(clusters=clusters, topk=topk, iterations=3)
    assert_same(results(mechanism, *given, **call), without_compiled(mechanism, *given, **call))


def test_whole_vectors_in_any_order(threads):
    mechanism = sq.Clustered(clusters=20, topk=8)
    leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors(250, 250, dim=32)[:3]]
    grad = tensors(250, 250)[3]
    for heads in (4, 1):  # the latter fewer than threads
        given = [x[:1, :heads] for x in (*leaves, grad)]
        assert_same(results(mechanism, *given), without_compiled(mechanism, *given))


def test_rounding_in_float32():
    mechanism = sq.Clustered(clusters=300, topk=16)  # each query for itself: no choice depends on rounding
    exact = without_compiled(mechanism, *tensors(300, 300, dim=64, value_dim=64))
    given = tensors(300, 300, dim=64, value_dim=64, dtype=torch.float32)
    errors = [
        [(x.double() - y).norm() for x, y in zip(run(mechanism, *given), exact, strict=True)]
        for run in (results, without_compiled)
    ]
    assert all(ours <= 2 * theirs for ours, theirs in zip(*errors, strict=True))


@pytest.mark.parametrize("keys", [30, 700])
def test_of_equal_keys_the_first_are_weighed(keys):
    q, k, v, grad = tensors(50, keys)
    with torch.no_grad():
        k[:, :, 5:, 1:], k[:, :, 5:, 0] = 0.0, 1.0  # one product each, which no order of sums can round otherwise
    mechanism = sq.Clustered(clusters=6, topk=9)
    assert_same(results(mechanism, q, k, v, grad), without_compiled(mechanism, q, k, v, grad))


def test_a_nan_stays_in_its_head():
    q, k, v, grad = tensors(60, 60)
    with torch.no_grad():
        q[0, 0, 7], k[0, 1, 3], v[0, 2, 5] = torch.nan, torch.nan, torch.nan
    found = results(sq.Clustered(clusters=5, topk=3), q, k, v, grad)
    assert found[0][0, 0].isnan().any()
    assert found[0][0, 1].isnan().all()
    assert found[0][0, 2].isnan().any()
    for x in found:
        assert x[0, 3].isfinite().all()
        assert x[1].isfinite().all()


def test_second_derivatives():
    def second():
        q, k, v, grad = tensors(9, 9, dim=5, value_dim=3)
        out = sq.attention(q, k, v, sq.Clustered(clusters=3, topk=2))
        first = torch.autograd.grad(out, (q, k, v), grad.requires_grad_(), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (grad, q, k, v))

    found = second()
    with dispatch.disabled():
        expected = second()
    assert_same(found, expected)


def test_only_the_gradients_asked_for():
    q, k, v, grad = tensors(20, 20)
    mechanism = sq.Clustered(clusters=3, topk=2)
    (found,) = torch.autograd.grad(sq.attention(q.detach(), k, v.detach(), mechanism), k, grad)
    with dispatch.disabled():
        (expected,) = torch.autograd.grad(sq.attention(q, k, v, mechanism), k, grad)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("topk", [0, 4])
@torch.no_grad()
def test_values_near_the_largest_number(topk):
    """Weights are divided by their sum before they meet the values."""
    q, k = torch.randn(2, 1, 1, 40, 8, generator=torch.Generator().manual_seed(6)).unbind(0)
    found = sq.attention(q, k, torch.full((1, 1, 40, 3), 3e38), sq.Clustered(clusters=4, topk=topk))
    torch.testing.assert_close(found, torch.full_like(found, 3e38))
