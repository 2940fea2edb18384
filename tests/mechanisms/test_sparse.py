"""The two patterns of the Sparse Transformer: strides, halves of heads, and what the default stride refuses."""

import pytest
import torch

import subquad as sq
from tests.harness import Case, assert_close, inputs


def visible_pairs(mechanism, length, *, heads=4, is_causal=False):
    """(H, N, N) bool, read off an output whose values are the identity."""
    q, k = (torch.randn(1, heads, length, 8, dtype=torch.float64) for _ in range(2))
    identity = torch.eye(length, dtype=torch.float64).expand(1, heads, -1, -1)
    return sq.attention(q, k, identity, mechanism, is_causal=is_causal)[0] != 0


def pairs(length):
    position = torch.arange(length)
    return position[:, None], position[None, :]


@pytest.mark.parametrize("method", [sq.SparseStrided, sq.SparseFixed])
@pytest.mark.parametrize(("length", "stride"), [(1, 1), (10, 3), (64, 8), (70, 8), (73, 9)])
@torch.no_grad()
def test_the_default_stride_is_the_root_of_the_length(method, length, stride):
    x = inputs(length)
    assert_close(Case(method()).run(x), Case(method(stride=stride)).run(x))


@pytest.mark.parametrize("method", ["sparse_strided", "sparse_fixed"])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"key_padding_mask": torch.ones(2, 9, dtype=torch.bool)}])
def test_without_a_stride_what_depends_on_the_length_is_refused(method, options):
    x = inputs(9)
    with pytest.raises(sq.UnsupportedError, match="set stride"):
        sq.attention(x.query, x.key, x.value, method, **options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_strided_heads(is_causal):
    i, j = pairs(40)
    before = (j <= i) if is_causal else torch.ones(40, 40, dtype=torch.bool)
    near, far = ((i - j).abs() < 6) & before, ((i - j) % 6 == 0) & before
    assert (visible_pairs(sq.SparseStrided(stride=6), 40, is_causal=is_causal) == (near | far)).all()
    seen = visible_pairs(sq.SparseStrided(stride=6, heads="split"), 40, heads=5, is_causal=is_causal)
    assert (seen[:3] == near).all()
    assert (seen[3:] == far).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_fixed_heads(is_causal):
    i, j = pairs(40)
    before = (j <= i) if is_causal else torch.ones(40, 40, dtype=torch.bool)
    own, summary = (i // 6 == j // 6) & before, (j % 6 >= 4) & before
    assert (visible_pairs(sq.SparseFixed(stride=6, summary=2), 40, is_causal=is_causal) == (own | summary)).all()
    seen = visible_pairs(sq.SparseFixed(stride=6, summary=2, heads="split"), 40, heads=3, is_causal=is_causal)
    assert (seen[:2] == own).all()
    assert (seen[2:] == (summary | (i == j))).all()


@pytest.mark.parametrize("method", [sq.SparseStrided, sq.SparseFixed])
def test_one_head_has_the_first_half(method):
    i, j = pairs(20)
    near = (i - j).abs() < 4 if method is sq.SparseStrided else i // 4 == j // 4
    assert (visible_pairs(method(stride=4, heads="split"), 20, heads=1) == near).all()


@pytest.mark.parametrize("method", [sq.SparseStrided, sq.SparseFixed])
@pytest.mark.parametrize("stride", [1, 30, 31, 500])
@torch.no_grad()
def test_strides_that_leave_nothing_out(method, stride):
    x = inputs(30)
    assert_close(Case(method(stride=stride)).run(x), Case(sq.Softmax()).run(x))


@torch.no_grad()
def test_all_tokens_of_a_block_as_its_summary_leave_nothing_out():
    x = inputs(30)
    for is_causal in (False, True):
        found = Case(sq.SparseFixed(stride=4, summary=4)).run(x, is_causal=is_causal)
        assert_close(found, Case(sq.Softmax()).run(x, is_causal=is_causal))


def test_a_summary_longer_than_its_block_is_refused():
    with pytest.raises(sq.OptionError, match="at most stride, 4; got 5"):
        sq.SparseFixed(stride=4, summary=5)
