import pytest
import torch

import subquad as sq
from subquad.families.random_features import gaussian
from subquad.ops.clustered import kmeans, operator, pytorch
from tests.harness import Largest, assert_close, inputs


def padding(*lengths, total):
    return torch.arange(total) < torch.tensor(lengths).unsqueeze(-1)


@pytest.mark.parametrize(("queries", "keys", "clusters"), [(40, 40, 3), (40, 23, 7), (23, 40, 100)])
@torch.no_grad()
def test_with_all_keys_exact_it_is_softmax(queries, keys, clusters):
    x = inputs(queries, keys)
    real = padding(keys - 4, 5, total=keys)
    for mask in (None, real):
        options = {"key_padding_mask": mask, "scale": 1.7}
        found = sq.attention(x.query, x.key, x.value, sq.Clustered(clusters=clusters, topk=keys), **options)
        assert_close(found, sq.attention(x.query, x.key, x.value, **options))


@pytest.mark.parametrize("topk", [0, 3])
@torch.no_grad()
def test_alone_in_its_cluster_a_query_is_served_exactly(topk):
    x = inputs(40)
    code = kmeans._sign(x.query @ gaussian(64, 5, 0).mT)
    assert all(len(head.unique(dim=0)) == 40 for head in code.flatten(0, 1))
    found = sq.attention(x.query, x.key, x.value, sq.Clustered(clusters=40, topk=topk, bits=64))
    assert_close(found, sq.attention(x.query, x.key, x.value))


@pytest.mark.parametrize("topk", [0, 1, 6, 100])
@torch.no_grad()
def test_weights_sum_to_one(topk):
    x = inputs(60)
    mechanism = sq.Clustered(clusters=4, topk=topk)
    for mask in (None, padding(60, 3, total=60)):
        out = sq.attention(x.query, x.key, torch.ones_like(x.value), mechanism, key_padding_mask=mask)
        assert_close(out, torch.ones_like(out))


@torch.no_grad()
def test_more_exact_keys_and_more_clusters_come_closer_to_softmax():
    x = inputs(300, batch=4).map(lambda t: t * 2)
    exact = sq.attention(x.query, x.key, x.value)

    def error(**options):
        return (sq.attention(x.query, x.key, x.value, sq.Clustered(**options)) - exact).norm()

    by_keys = [error(clusters=10, topk=k) for k in (0, 8, 32, 128)]
    by_clusters = [error(clusters=c, topk=8) for c in (5, 20, 80)]
    assert by_keys == sorted(by_keys, reverse=True)
    assert by_clusters == sorted(by_clusters, reverse=True)


def test_k_means_by_hand():
    """The first centroids, codes 0 and 3, lie in the same of two groups; the other group takes the first one over."""
    a = torch.ones(8)
    near = a.clone()
    near[0] = -1
    code = torch.stack([near, -a, -a, a, -a, a])[None, None]
    assert operator.ASSIGN(code, None, 2, 0).tolist() == [[[0, 0, 0, 1, 0, 1]]]
    assert operator.ASSIGN(code, None, 2, 3).tolist() == [[[1, 0, 0, 1, 0, 1]]]
    assert operator.ASSIGN(code, torch.tensor([[True, False, False, True, True, True]]), 2, 0).tolist() == [
        [[0, 1, 1, 0, 1, 0]]
    ]


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_the_nearest_is_the_first_largest(integer):
    code, centroid = (kmeans._sign(torch.randn(2, 3, n, 6)) for n in (50, 20))
    agreement, precedence = code @ centroid.mT, 19 - torch.arange(20, dtype=integer)
    assert ((agreement == agreement.amax(-1, keepdim=True)).sum(-1) > 1).any()
    assert torch.equal(kmeans._nearest(code, centroid, precedence), agreement.argmax(-1))


def test_ties_go_to_the_first():
    same = torch.ones(1, 1, 5, 8)
    assert (operator.ASSIGN(same, None, 3, 4) == 0).all()
    scores = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0], [0.0] * 5])
    assert pytorch._top_indices(scores, 3).tolist() == [[1, 3, 0], [0, 1, 2]]


def test_pads_of_queries_shape_nothing_and_keep_their_content():
    x = inputs(30)
    real = padding(20, 30, total=30)
    mechanism = sq.Clustered(clusters=4, topk=3)
    expected = sq.attention(x.query, x.key, x.value, mechanism, key_padding_mask=real)
    changed = x.query.clone()
    changed[0, :, 25:] *= -50
    found = sq.attention(changed, x.key, x.value, mechanism, key_padding_mask=real)
    assert torch.equal(found[0, :, :25], expected[0, :, :25])
    assert (found[0, :, 25:] != expected[0, :, 25:]).any()


def test_choices_carry_no_gradient_and_means_do():
    x = inputs(30, grad=True)
    for topk in (0, 3):
        sq.attention(x.query, x.key, x.value, sq.Clustered(clusters=4, topk=topk)).square().sum().backward()
        assert (x.query.grad.abs().sum(-1) > 0).all()
        x.query.grad = None


@pytest.mark.parametrize("grad", [False, True])
def test_never_all_pairs(grad):
    n = 20_000
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=grad) for _ in range(3))
    with Largest() as largest:
        out = sq.attention(q, k, v, sq.Clustered(clusters=20, topk=16, iterations=2))
        if grad:
            out.sum().backward()
    # Recorded, the weights of all clusters are kept; else nothing is larger than the codes.
    assert largest.numel <= (n * 40 if grad else n * 33)


@torch.no_grad()
def test_a_nan_is_not_hidden():
    x = inputs(20)
    x.key[0, 0, 3] = torch.nan
    out = sq.attention(x.query, x.key, x.value, sq.Clustered(clusters=3, topk=4))
    assert out[0, 0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("name", ["clusters", "bits", "iterations"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_options(name, value):
    with pytest.raises(sq.OptionError, match=f"Clustered.{name} must be an integer of at least 1"):
        sq.Clustered(**{name: value})


def test_topk_may_be_zero_and_not_less():
    with pytest.raises(sq.OptionError, match="topk must be an integer of at least 0"):
        sq.Clustered(topk=-1)
