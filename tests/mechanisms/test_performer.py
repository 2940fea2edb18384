"""The theory of FAVOR+, on the features that the engine uses: unbiased, with the mean squared errors of the papers."""

import math
from contextlib import nullcontext

import pytest
import torch

import subquad as sq
from subquad.engines.call import Call
from subquad.families.random_features import gaussian, orthogonal
from subquad.mechanisms.performer import features, measure_p
from subquad.ops import dispatch

DIM, DRAWS = 4, 1_000_000
X = torch.tensor([[0.15, -0.25, 0.2, 0.05]], dtype=torch.float64)
Y = torch.tensor([[0.3, 0.1, 0.25, -0.2]], dtype=torch.float64)
TRUTH = (X @ Y.mT).exp().item()  # SM(x, y)
PLUS, MINUS = (X + Y).square().sum().item(), (X - Y).square().sum().item()  # |x + y|^2, |x - y|^2

# The papers' mean squared errors, times the number m of directions.
MSE = {
    "positive": math.exp(PLUS) * TRUTH**2 * (1 - math.exp(-PLUS)),
    "hyperbolic": math.exp(PLUS) * TRUTH**2 * (1 - math.exp(-PLUS)) ** 2 / 2,
    "trig": math.exp(PLUS) * TRUTH**-2 * (1 - math.exp(-MINUS)) ** 2 / 2,
}


def optimal_a(p):
    return torch.tensor((1 - 2 * p - math.sqrt((2 * p + 1) ** 2 + 8 * p)) / 16, dtype=torch.float64)


def estimates(kind, w, a=None, x=X, y=Y):
    """The estimate of e^(x.y) by each single direction of w (m, D): (m,)."""
    (fx, bx), (fy, by) = (features(v, w, kind, a=a) for v in (x, y))
    terms = (fx * fy * (bx + by).exp()).reshape(-1, len(w)).sum(0)  # [sin, cos] and [e^u, e^-u] belong together
    return terms * len(w)


def assert_mean(samples, expected, deviations=4):
    """The mean of independent samples is `expected`, within its standard error."""
    error = samples.std() / math.sqrt(samples.numel())
    assert abs(samples.mean() - expected) < deviations * error
    assert error < 0.02 * abs(expected)


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trig", "favor++"])
def test_the_estimate_is_unbiased(kind):
    a = optimal_a(PLUS / DIM) if kind == "favor++" else None
    assert_mean(estimates(kind, gaussian(DRAWS, DIM, seed=1), a), TRUTH)


@pytest.mark.parametrize("kind", MSE)
def test_mean_squared_error_is_the_papers(kind):
    squares = (estimates(kind, gaussian(DRAWS, DIM, seed=2)) - TRUTH).square()
    assert_mean(squares, MSE[kind])


def test_favor_plus_plus_has_a_lower_error_than_positive():
    w = gaussian(DRAWS, DIM, seed=3)
    optimal = (estimates("favor++", w, optimal_a(PLUS / DIM)) - TRUTH).square().mean()
    assert optimal < 0.9 * MSE["positive"]


def test_favor_plus_plus_at_p_0_is_positive():
    w = gaussian(50, DIM, seed=3)
    torch.testing.assert_close(estimates("favor++", w, optimal_a(0.0)), estimates("positive", w))


def test_orthogonal_directions_have_a_lower_error_than_independent_ones():
    blocks = 20_000
    grouped = {
        draw.__name__: estimates("positive", draw(blocks * DIM, DIM, seed=4)).reshape(blocks, DIM).mean(1)
        for draw in (gaussian, orthogonal)
    }
    for estimate in grouped.values():
        assert_mean(estimate, TRUTH)
    squares = {name: (estimate - TRUTH).square() for name, estimate in grouped.items()}
    assert_mean(squares["gaussian"], MSE["positive"] / DIM, deviations=5)
    gap = squares["gaussian"].mean() - squares["orthogonal"].mean()
    noise = math.sqrt(sum((s.var() / blocks).item() for s in squares.values()))
    assert gap > 4 * noise


def test_orthogonal_directions_are_unbiased_only_with_the_sign_correction():
    dim, blocks = 16, 20_000
    x = torch.full((1, dim), 0.25, dtype=torch.float64)
    truth = (x @ x.mT).exp().item()
    corrected = estimates("positive", orthogonal(blocks * dim, dim, seed=5), x=x, y=x)
    assert_mean(corrected.reshape(blocks, dim).mean(1), truth)

    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(blocks, dim, dim, generator=generator, dtype=torch.float64)
    raw = torch.linalg.qr(normal).Q.mT.reshape(-1, dim)
    lengths = torch.randn(raw.shape, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    biased = estimates("positive", raw * lengths, x=x, y=x).reshape(blocks, dim).mean(1)
    assert abs(biased.mean() - truth) > 8 * biased.std() / math.sqrt(blocks)


@pytest.mark.parametrize("count", [1, 5, 7, 14, 20])
def test_blocks_are_orthogonal(count):
    w = orthogonal(count, 7, seed=6)
    assert w.shape == (count, 7)
    for block in w.split(7):
        gram = block @ block.mT
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()))


def test_options_reach_the_draw():
    sizes = sq.Performer().build(heads=2, head_dim=6).sizes
    drawn = lambda **options: sq.Performer(features=9, seed=4, **options).buffers(sizes)["projection"]
    assert torch.equal(drawn(), orthogonal(9, 6, seed=4))
    assert torch.equal(drawn(orthogonal=False), gaussian(9, 6, seed=4))
    assert torch.equal(drawn(regularized=True), orthogonal(9, 6, seed=4, regularized=True))


def test_lengths():
    squares = orthogonal(30_000, 6, seed=7).square().sum(-1)
    assert_mean(squares, 6.0)  # chi^2(6): mean 6, variance 12
    assert abs(squares.var() - 12) < 1
    regularized = orthogonal(30, 6, seed=7, regularized=True).norm(dim=-1)
    torch.testing.assert_close(regularized, torch.full((30,), math.sqrt(6), dtype=torch.float64))


def test_error_of_attention_falls_with_more_features():
    q, k, v = torch.randn(3, 1, 4, 200, 16, dtype=torch.float64).unbind(0)
    q, k = q / 2, k / 2
    exact = sq.attention(q, k, v)

    def error(m):
        runs = [sq.attention(q, k, v, sq.Performer(features=m, seed=seed)) - exact for seed in range(5)]
        return sum(run.norm().item() for run in runs) / exact.norm().item() / 5

    coarse, fine = error(64), error(4096)
    assert fine < coarse / 4  # 64 times the features: 8 times less, in the limit


def test_measured_p():
    q, k = torch.randn(2, 4, 9, 5, dtype=torch.float64), torch.randn(2, 2, 11, 5, dtype=torch.float64)
    x, y = q * 5**-0.25, k.repeat_interleave(2, dim=1) * 5**-0.25
    pairs = (x.unsqueeze(3) + y.unsqueeze(2)).square().sum(-1).mean((1, 2, 3)) / 5
    torch.testing.assert_close(measure_p(q, k).flatten(), pairs)
    mechanism = sq.Performer(kind="favor++", p=pairs[0].item())
    one = sq.attention(q[:1], k[:1], k[:1], mechanism, enable_gqa=True)
    torch.testing.assert_close(one, sq.attention(q, k, k, sq.Performer(kind="favor++"), enable_gqa=True)[:1])


def test_a_large_later_key_does_not_drown_the_earlier_ones():
    """One maximum for the whole sequence would make all features of the first keys 0 here."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 128, 16) for _ in range(3))
    k[:, :, 100:] *= 12
    early = sq.attention(q[:, :, :100], k[:, :, :100], v[:, :, :100], "performer", is_causal=True)
    torch.testing.assert_close(sq.attention(q, k, v, "performer", is_causal=True)[:, :, :100], early)


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trig", "favor++"])
def test_the_reference_stays_in_range_where_the_engine_does(kind):
    q, k, v = (10 * torch.randn(1, 1, 5, 64, dtype=torch.float64) for _ in range(3))
    performer = sq.Performer(kind=kind, features=16, p=1.0 if kind == "favor++" else None)
    module = performer.build(heads=1, head_dim=64).double()
    truth = sq.reference.attention(performer, q, k, v, weights=dict(module.named_buffers()))
    assert (truth.abs().sum(-1) > 0).all()
    torch.testing.assert_close(module(q, k, v), truth)


@pytest.mark.parametrize("body", [nullcontext, dispatch.disabled], ids=["compiled", "fallback"])
def test_relu_features_of_tiny_keys_have_gradients(body):
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind(0)
    k = (k * 1e-30).requires_grad_()
    with body():
        (grad,) = torch.autograd.grad(sq.attention(q, k, v, sq.Performer(kind="relu", features=16)).sum(), k)
    assert (grad.abs().amax(-1) > 0).all()


def test_directions_of_one_length_have_one_factor():
    """A|w|^2 is the same for all of them, and must not differ by its rounding, which a large p makes larger than everything else."""
    performer = sq.Performer(kind="favor++", p=1e20, features=24, regularized=True)
    x = torch.randn(1, 1, 5, 16)
    weights = dict(performer.build(heads=1, head_dim=16).named_buffers())
    native = performer.rule(Call(query=x, key=x, value=x, weights=weights)).feature_map.native
    assert native.bias.unique().numel() == 1
