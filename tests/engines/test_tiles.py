"""Softmax over tile groups: PyTorch without its fused kernel, pieces, empty rows, large scores, and no large tensor."""

import weakref

import pytest
import torch

import subquad as sq
from subquad import reference
from subquad.bench.measure import peak_bytes
from subquad.ops import dispatch, native_library, tiles
from subquad.ops.tiles import MASKED, Tile, TileGroup, one_tile, pytorch
from tests.harness import Largest, assert_close

MECHANISMS = [
    sq.Local(window=9),
    sq.Local(window=4, dilation=3),
    sq.SparseStrided(stride=7),
    sq.SparseFixed(stride=8, summary=2),
    sq.Longformer(window=9, num_global=3),
    sq.BigBird(block=8),
    sq.Reformer(buckets=4, chunk=8, rounds=2),
    sq.Routing(clusters=3, chunk=8),
    sq.Pooled(stride=6, window=5),
]
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.info.name)


def results(mechanism, is_causal, length=130):
    """Output and gradients, with values as wide as keys."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, heads, length, 6, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    k, v = (q, torch.cat([v, v], dim=1)) if mechanism.shares_query_and_key else (k, v)
    out = sq.attention(q, k, v, mechanism, is_causal=is_causal, enable_gqa=True)
    return [out, *torch.autograd.grad(out.square().sum(), [q, k, v])]


@every_mechanism
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_plain_path_equals_the_fused_one(mechanism, is_causal, monkeypatch):
    with dispatch.disabled():
        fused = results(mechanism, is_causal)
        monkeypatch.setattr(one_tile, "_has_fused_kernel", lambda query, key: False)
        plain = results(mechanism, is_causal)
    for ours, theirs in zip(plain, fused, strict=True):
        assert_close(ours, theirs)


@every_mechanism
@pytest.mark.parametrize("is_causal", [False, True])
def test_pieces_equal_the_whole(mechanism, is_causal, monkeypatch):
    whole = results(mechanism, is_causal)
    monkeypatch.setattr(pytorch, "_PIECE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with dispatch.disabled():
        pieces = results(mechanism, is_causal)
    for ours, theirs in zip(pieces, whole, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("kernel", ["compiled", "fused", "plain"])
def test_a_query_whose_pairs_are_all_masked(kernel, monkeypatch):
    if kernel != "compiled":
        monkeypatch.setattr(native_library, "load", lambda: None)
    if kernel == "plain":
        monkeypatch.setattr(one_tile, "_has_fused_kernel", lambda query, key: False)
    q, k, v = (torch.randn(1, 1, *n, 4, dtype=torch.float64, requires_grad=True) for n in ((1, 3), (5,), (5,)))
    mask = torch.zeros(1, 1, 3, 5, dtype=torch.float64)
    mask[:, :, 1] = MASKED
    out, empty = tiles.attend([TileGroup(q, k, v, [Tile(0, 3, 1, 0, 0, 5, mask)])], 3, 0.5)
    assert empty.tolist() == [[False, True, False]]
    assert (out[0, 1] == 0).all()
    assert (out[0, 0] != 0).all()
    for grad in torch.autograd.grad(out[0, 1].sum(), [q, k, v]):
        assert (grad == 0).all()


@pytest.mark.parametrize("kernel", ["compiled", "pytorch"])
def test_several_queries_may_share_an_output_row(kernel, monkeypatch):
    """Rows that `output_row` repeats are merged, and row N is discarded."""
    if kernel != "compiled":
        monkeypatch.setattr(native_library, "load", lambda: None)
    q, k, v = (torch.randn(1, 1, *n, 4, dtype=torch.float64) for n in ((1, 2), (6,), (6,)))
    split = TileGroup(
        torch.cat([q, q, q[:, :, :, :1]], dim=3),
        k,
        v,
        [Tile(0, 2, 2, 0, 3, 3), Tile(4, 1, 1, 0, 0, 6)],
        torch.tensor([[0, 1, 0, 1, 2]]),
    )
    out, _ = tiles.attend([split], 2, 1.0)
    assert_close(out[0], (q[0, 0, 0] @ k[0, 0].T).softmax(-1) @ v[0, 0])


@pytest.mark.parametrize("kernel", ["compiled", "pytorch"])
def test_hooks_reach_the_masks_saved_for_the_backward_pass(kernel, monkeypatch):
    """Otherwise activation checkpointing and offloading would leave them in memory."""
    if kernel != "compiled":
        monkeypatch.setattr(native_library, "load", lambda: None)
    q, k, v = (torch.randn(1, 1, *n, 4, requires_grad=True) for n in ((1, 3), (5,), (5,)))
    mask = torch.zeros(1, 1, 3, 5)
    kept = weakref.ref(mask)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        out, _ = tiles.attend([TileGroup(q, k, v, [Tile(0, 3, 1, 0, 0, 5, mask)])], 3, 0.5)
    del mask
    assert kept() is None
    out.sum().backward()
    assert q.grad is not None


@torch.no_grad()
def test_large_scores_choose_the_same_pairs():
    q = torch.randn(1, 1, 60, 4, dtype=torch.float64) * 1e10
    identity = torch.eye(60, dtype=torch.float64)[None, None]
    seen = sq.attention(q, q, identity, sq.Local(window=3))[0, 0] != 0
    i, j = torch.arange(60)[:, None], torch.arange(60)
    assert not (seen & ((i - j).abs() > 3)).any()
    assert seen.any(-1).all()


# The others cost more than linear time and memory.
every_linear_mechanism = pytest.mark.parametrize(
    "mechanism",
    [mechanism for mechanism in MECHANISMS if mechanism.info.name not in ("sparse_strided", "sparse_fixed", "pooled")],
    ids=lambda mechanism: mechanism.info.name,
)


def run_long(mechanism, length, grad):
    q, k, v = (torch.randn(1, 1, length, 8, requires_grad=grad) for _ in range(3))
    with torch.set_grad_enabled(grad):
        out = sq.attention(q, q if mechanism.shares_query_and_key else k, v, mechanism)
        if grad:
            out.sum().backward()


@every_linear_mechanism
@pytest.mark.parametrize("grad", [False, True])
def test_nothing_larger_than_linear(mechanism, grad):
    """In the PyTorch fallback, which is what runs while operations are watched."""
    length, dim = 20_000, 8
    with Largest() as largest:
        run_long(mechanism, length, grad)
    rows = 64  # queries of a block, and as many keys more than it needs
    assert largest.numel <= length * 8 * (dim + 1) + length * 3 * rows


@every_linear_mechanism
@pytest.mark.parametrize("grad", [False, True])
def test_peak_memory_grows_linearly(mechanism, grad):
    """In the compiled kernels, where there are any."""
    short, long = (peak_bytes(lambda n=n: run_long(mechanism, n, grad), "cpu")[0] for n in (10_000, 40_000))
    assert 0 < long <= 4.2 * short


@every_mechanism
def test_functional_gradients(mechanism):
    generator = torch.Generator().manual_seed(1)
    q, v = (torch.randn(1, 2, 40, 6, generator=generator, dtype=torch.float64) for _ in range(2))

    def total(q):
        return sq.attention(q, q, v, mechanism).square().sum()

    leaf = q.clone().requires_grad_()
    assert_close(torch.func.grad(total)(q), torch.autograd.grad(total(leaf), leaf)[0])


@pytest.mark.parametrize("mechanism", [*MECHANISMS, sq.SVD(rank=3)], ids=lambda mechanism: mechanism.info.name)
def test_second_derivatives_are_refused_wherever_they_are_asked_for(mechanism):
    q, v = (torch.randn(1, 2, 20, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    x = q @ weight
    (grad,) = torch.autograd.grad(sq.attention(x, x, v, mechanism).square().sum(), q, create_graph=True)
    for wrt in (q, v, weight):
        with pytest.raises((sq.UnsupportedError, RuntimeError), match=r"first derivatives only|is not implemented"):
            torch.autograd.grad(grad.square().sum(), wrt, retain_graph=True)


LARGE = [
    sq.Reformer(chunk=10**6),
    sq.Reformer(chunk=10**6, shared_qk=False),
    sq.Routing(chunk=10**6),
    sq.SparseFixed(stride=10**6, summary=10),
    sq.SparseFixed(stride=10**6, heads="split"),
    sq.SparseStrided(stride=10**6),
    sq.BigBird(block=10**6),
    sq.BigBird(block=2, random=10**6, globals=10**6),
    sq.Local(window=10**6),
    sq.Local(dilation=10**6),
    sq.Longformer(window=2, num_global=10**6),
    sq.Pooled(stride=10**6, window=10**6),
]


@pytest.mark.parametrize("mechanism", LARGE, ids=repr)
@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_options_larger_than_the_sequence(mechanism, is_causal):
    q, v = torch.randn(1, 2, 9, 6, dtype=torch.float64), torch.randn(1, 2, 9, 5, dtype=torch.float64)
    weights = mechanism.build(heads=2, head_dim=6).double().state_dict()
    with Largest() as largest:
        found = sq.attention(q, q, v, mechanism, is_causal=is_causal)
    assert_close(found, reference.attention(mechanism, q, q, v, weights=weights, is_causal=is_causal))
    assert largest.numel < 10**5


@every_mechanism
@pytest.mark.parametrize("with_compiled", [False, True])
def test_channels_that_are_not_adjacent(mechanism, with_compiled):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 2, 17, 131, generator=generator).transpose(2, 3) for _ in range(3))
    k = q if mechanism.shares_query_and_key else k

    def attend(*given):
        if with_compiled:
            return sq.attention(*given, mechanism)
        with dispatch.disabled():
            return sq.attention(*given, mechanism)

    together = [x.contiguous() for x in (q, k, v)]
    together[1] = together[0] if mechanism.shares_query_and_key else together[1]
    torch.testing.assert_close(attend(q, k, v), attend(*together))
