from contextlib import nullcontext

import pytest
import torch

import subquad as sq
from subquad import reference
from subquad.ops import dispatch
from subquad.ops.hybrid import pytorch
from subquad.ops.kernelized.chunk_weights import CHUNK
from tests.harness import Largest, assert_close

MAPS = ("hedgehog", "t2r", "linear")
both_ways = pytest.mark.parametrize("is_causal", [False, True])


def qkv(length, heads=2, dim=4, dtype=torch.float64):
    return (torch.randn(1, heads, length, dim, dtype=dtype) for _ in range(3))


@both_ways
@torch.no_grad()
def test_a_window_over_all_is_softmax(is_causal):
    q, k, v = qkv(90)
    module = sq.Hybrid(window=90).build(heads=2, head_dim=4)
    assert_close(module(q, k, v, is_causal=is_causal), sq.attention(q, k, v, is_causal=is_causal))


@both_ways
@torch.no_grad()
def test_without_far_weights_it_is_local(is_causal):
    """So `window` means the same there. The features are dead, or have a vanishing weight."""
    q, k, v = qkv(150)
    expected = sq.attention(q, k, v, sq.Local(window=7), is_causal=is_causal)
    dead = sq.Hybrid(window=7, map="t2r").build(heads=2, head_dim=4)
    dead.query_bias.fill_(-1e3)
    light = sq.Hybrid(window=7).build(heads=2, head_dim=4)
    light.log_mix.fill_(-1e3)
    for module in (dead, light):
        assert_close(module(q, k, v, is_causal=is_causal), expected)


@both_ways
@pytest.mark.parametrize("name", MAPS)
@torch.no_grad()
def test_without_near_weights_it_is_the_map(name, is_causal):
    """The only near key is the query's own, and it vanishes beside a factor of e^1000 on the far keys."""
    q, k, v = qkv(150)
    module = sq.Hybrid(window=0, map=name).build(heads=2, head_dim=4).double()
    weights = dict(module.named_parameters())
    module.log_mix.fill_(1e3)
    far = torch.ones(150, 150, dtype=torch.bool).tril(-1) if is_causal else ~torch.eye(150, dtype=torch.bool)
    phi = [reference.feature_maps.phi(name, x, weights, side, None) for x, side in ((q, "query"), (k, "key"))]
    pairs = phi[0] @ phi[1].mT * far
    there = pairs.sum(-1) > 0
    assert there.sum() > 200
    expected = pairs @ v / pairs.sum(-1, keepdim=True)
    assert_close(module(q, k, v, is_causal=is_causal)[there], expected[there])


def test_its_map_has_the_parameters_of_the_mechanism_itself():
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 5}
    for name, alone in (("hedgehog", sq.Hedgehog()), ("t2r", sq.T2R())):
        found = {n: p.shape for n, p in sq.Hybrid(map=name).build(**sizes).named_parameters()}
        assert found.pop("log_mix") == (4,)
        assert found == {n: p.shape for n, p in alone.build(**sizes).named_parameters()}
    assert [n for n, _ in sq.Hybrid(map="linear").build(**sizes).named_parameters()] == ["log_mix"]


@both_ways
@pytest.mark.parametrize("score", [1e4, -1e4])
@pytest.mark.parametrize("length", [6, 150])  # 6: no key is far
def test_scores_far_from_0(score, length, is_causal):
    """In float32, e^1e4 is infinite and e^-1e4 is 0. The features are equal, so far keys weigh 2 / D each."""
    module = sq.Hybrid(window=8).build(heads=1, head_dim=4)
    with torch.no_grad():
        module.query_weight.zero_()
    q, k = torch.full((1, 1, length, 4), 100.0), torch.full((1, 1, length, 4), score / 200)
    k = k * (1 + torch.rand(length, 1) / 1000)
    x = [t.requires_grad_() for t in (q, k, torch.randn(1, 1, length, 4))]
    assert ((q @ k.mT / 2).abs() > 9_999).all()
    out = module(*x, is_causal=is_causal)
    truth = reference.attention(
        module.method, *(t.double() for t in x), weights=dict(module.named_parameters()), is_causal=is_causal
    )
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=5e-3)  # scores of 1e4 are known to 1e-3
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.square().sum(), [*x, *module.parameters()]))
    if score < 0 and length > 8:  # nothing but the far keys
        i = torch.arange(length)
        steps = i[:, None] - i
        far = (steps > 8 if is_causal else steps.abs() > 8).float()
        rows = far.any(-1)
        torch.testing.assert_close(out[0, 0, rows], (far @ x[2][0, 0] / far.sum(-1, keepdim=True).clamp(min=1))[rows])


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
def test_inputs_of_any_size_give_finite_outputs_and_gradients(name, size):
    module = sq.Hybrid(window=3, map=name).build(heads=2, head_dim=4)
    q, k, v = (x.requires_grad_() for x in qkv(100, dtype=torch.float32))
    for is_causal in (False, True):
        out = module(q * size, k * size, v, is_causal=is_causal)
        assert (out.abs() <= v.abs().max() * 1.001).all()  # a mean of values
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), [q, k, v, *module.parameters()]))


@torch.no_grad()
def test_the_far_sums_are_not_differences():
    """With one huge value inside the window, the sums over keys beyond it keep their precision."""
    module = sq.Hybrid(window=2, map="linear").build(heads=1, head_dim=4)
    module.log_mix.fill_(30.0)
    q, k, v = qkv(200, heads=1, dtype=torch.float32)
    k[:, :, 100] = 1e6
    v[:, :, 100] = 1e6
    rows = slice(98, 103)  # all have it in the window, and none has a score so large that it matters
    q[:, :, rows] = -q[:, :, rows].abs()
    weights = dict(module.named_parameters())
    truth = reference.attention(module.method, q.double(), k.double(), v.double(), weights=weights)
    torch.testing.assert_close(module(q, k, v)[:, :, rows].double(), truth[:, :, rows], rtol=1e-4, atol=1e-5)


@both_ways
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kernels", [nullcontext, dispatch.disabled], ids=["kernels", "PyTorch"])
def test_nothing_grows_with_the_square(is_causal, grad, kernels):
    n, dim, window = 32_768, 16, 8
    module = sq.Hybrid(window=window).build(heads=1, head_dim=dim)
    q, k, v = (torch.randn(1, 1, n, dim, requires_grad=grad) for _ in range(3))
    with Largest() as largest, torch.set_grad_enabled(grad), kernels():
        out = module(q, k, v, is_causal=is_causal)
        if grad:
            out.sum().backward()
    pairs = n * (CHUNK + 2 * window) if grad else pytorch._PIECE_PAIRS
    assert largest.numel <= max(pairs, (n + CHUNK + 2 * window) * 2 * dim)


@both_ways
@pytest.mark.parametrize("length", [1, 63, 70, 71])  # the span of a chunk of 64 has 71 keys, or 78
def test_a_short_sequence_is_one_chunk_and_gives_the_same(length, is_causal, monkeypatch):
    def found(limit):
        monkeypatch.setattr(pytorch, "_SHORT", limit)
        torch.manual_seed(0)
        module = sq.Hybrid(window=7).build(heads=2, head_dim=4).double()
        q, k, v = (x.repeat(2, 1, 1, 1).requires_grad_() for x in qkv(length))
        real = torch.arange(length) < torch.tensor([[length], [length - 5]]).clamp(min=1)
        with Largest() as largest, dispatch.disabled():
            out = module(q, k, v, is_causal=is_causal, key_padding_mask=real)
        grads = torch.autograd.grad(out.square().sum(), [q, k, v, *module.parameters()])
        return largest.numel, (out, *grads)

    (less, short), (more, chunks) = found(256), found(0)
    for one, other in zip(short, chunks, strict=True):
        assert_close(one, other)
    assert less < more or length == 1


def test_options():
    with pytest.raises(sq.OptionError, match="map must be one of 'hedgehog', 't2r', 'linear'; got 'elu'"):
        sq.Hybrid(map="elu")
    with pytest.raises(sq.OptionError, match="features is only for map='t2r', but map is 'hedgehog'"):
        sq.Hybrid(features=8)
    with pytest.raises(sq.OptionError, match="window must be an integer of at least 0; got -1"):
        sq.Hybrid(window=-1)
