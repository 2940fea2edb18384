"""Centroids: they follow the tokens in training, and nothing else moves them."""

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

import subquad as sq
from subquad.ops import dispatch
from tests.harness import inputs


def module(**options):
    return sq.Routing(clusters=5, chunk=8, **options).build(heads=3, head_dim=5, value_dim=7).double()


def followed(before, tokens, decay):
    """The moving average by hand: centroids (b, D), tokens (m, D) of one head."""
    tokens = normalize(tokens, dim=-1)
    nearest = (tokens @ before.T).argmax(-1)
    after = before.clone()
    for c in range(len(before)):
        members = tokens[nearest == c]
        if len(members):
            after[c] = normalize(decay * before[c] + (1 - decay) * members.mean(0), dim=-1)
    return after


@torch.no_grad()
def test_training_follows_the_tokens():
    routing, x = module(decay=0.9), inputs(30)
    before = routing.centroids.clone()
    routing(x.query, x.key, x.value)
    for head in range(3):
        tokens = torch.cat([x.query[:, head].flatten(0, 1), x.key[:, head].flatten(0, 1)])
        torch.testing.assert_close(routing.centroids[head], followed(before[head], tokens, 0.9))
    assert not torch.equal(routing.centroids, before)
    torch.testing.assert_close(routing.centroids.norm(dim=-1), torch.ones(3, 5, dtype=torch.float64))


@torch.no_grad()
def test_a_call_is_answered_with_the_centroids_from_before_it():
    routing, x = module(decay=0.1), inputs(30)
    expected = module().eval()(x.query, x.key, x.value)
    assert torch.equal(routing(x.query, x.key, x.value), expected)
    assert not torch.equal(routing(x.query, x.key, x.value), expected)


@torch.no_grad()
def test_pads_move_nothing():
    x, real = inputs(30), torch.ones(2, 30, dtype=torch.bool)
    real[:, 20:] = False
    padded, alone = module(), module()
    padded(x.query, x.key, x.value, key_padding_mask=real)
    alone(*(t[:, :, :20] for t in (x.query, x.key, x.value)))
    torch.testing.assert_close(padded.centroids, alone.centroids)


@torch.no_grad()
def test_a_centroid_without_tokens_stays():
    routing = module(decay=0.5)
    routing.centroids.copy_(normalize(torch.eye(5, dtype=torch.float64), dim=-1).expand(3, -1, -1))
    x = torch.zeros(1, 3, 4, 5, dtype=torch.float64)
    x[..., 0], x[..., 1] = 2.0, 0.5
    routing(x, x, torch.randn(1, 3, 4, 7, dtype=torch.float64))
    assert torch.equal(routing.centroids[:, 1:], torch.eye(5, dtype=torch.float64)[1:].expand(3, -1, -1))
    assert (routing.centroids[:, 0, 1] > 0).all()


@torch.no_grad()
def test_fewer_key_value_heads_share_centroids():
    routing = sq.Routing(clusters=4, decay=0.5).build(heads=4, kv_heads=2, head_dim=5).double()
    before, x = routing.centroids.clone(), inputs(12, heads=4, kv_heads=2)
    routing(x.query, x.key, x.key)
    tokens = torch.cat([x.query[:, 2:].flatten(0, 2), x.key[:, 1].flatten(0, 1)])
    torch.testing.assert_close(routing.centroids[1], followed(before[1], tokens, 0.5))


@torch.no_grad()
def test_centroids_are_saved_and_a_layer_trains_them():
    layer = sq.Attention(20, 4, sq.Routing(clusters=6, decay=0.5))
    before = layer.mechanism.centroids.clone()
    layer(torch.randn(2, 30, 20))
    assert not torch.equal(layer.mechanism.centroids, before)
    other = sq.Attention(20, 4, sq.Routing(clusters=6, decay=0.5))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 30, 20)
    assert torch.equal(layer.eval()(x), other.eval()(x))


@pytest.mark.parametrize("decay", [0, 1, 1.5, -0.1, "0.9", True])
def test_decay_is_between_0_and_1(decay):
    with pytest.raises(sq.OptionError, match=r"Routing\.decay must be"):
        sq.Routing(decay=decay)


@torch.no_grad()
def test_decoding_moves_nothing():
    routing, x = module(decay=0.5), inputs(12)
    before, state = routing.centroids.clone(), None
    for t in range(12):
        one = x.tokens(t, t + 1)
        _, state = routing(one.query, one.key, one.value, is_causal=True, state=state, return_state=True)
    assert torch.equal(routing.centroids, before)


def trained(run, steps=2):
    """Gradients of each step and the centroids after it, of a layer whose centroids move far at every call."""
    torch.manual_seed(3)
    layer = sq.Attention(20, 4, sq.Routing(clusters=6, chunk=3, decay=0.5)).double().train()
    seen = []
    for step in range(steps):
        x = torch.randn(2, 30, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).requires_grad_()
        layer.zero_grad()
        run(layer, x).sin().sum().backward()
        seen.append(([x.grad, *(p.grad.clone() for p in layer.parameters())], layer.mechanism.centroids.clone()))
    return layer, seen


def with_checkpoint(use_reentrant):
    return lambda layer, x: checkpoint(layer, x, use_reentrant=use_reentrant)


either_checkpoint = pytest.mark.parametrize("use_reentrant", [True, False])


@either_checkpoint
def test_checkpointing_repeats_a_call_with_the_centroids_it_met(use_reentrant):
    """Equal gradients, and centroids that moved once a step."""
    _, plain = trained(lambda layer, x: layer(x))
    _, found = trained(with_checkpoint(use_reentrant))
    for (gradients, centroids), (expected, moved) in zip(found, plain, strict=True):
        assert torch.equal(centroids, moved)
        for gradient, true in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, true, rtol=1e-12, atol=1e-12)


def test_moved_centroids_give_other_gradients():
    """So that the test above can fail: a repeated call with the centroids of afterwards answers otherwise."""

    def late(layer, x):
        with torch.no_grad():
            layer(x)
        return layer(x)

    (expected, _), (found, _) = trained(lambda layer, x: layer(x), steps=1)[1][0], trained(late, steps=1)[1][0]
    assert (found[0] - expected[0]).norm() > 0.01 * expected[0].norm()


@either_checkpoint
@pytest.mark.parametrize("second", [lambda x: 2 * x.flip(1).cos(), lambda x: x], ids=["other tokens", "the same"])
def test_checkpointing_of_two_calls_before_one_backward_pass(use_reentrant, second):
    def twice(run):
        return lambda layer, x: run(layer, x) + run(layer, second(x))

    plain = trained(twice(lambda layer, x: layer(x)), steps=1)[1]
    found = trained(twice(with_checkpoint(use_reentrant)), steps=1)[1]
    assert torch.equal(found[0][1], plain[0][1])
    for gradient, true in zip(found[0][0], plain[0][0], strict=True):
        torch.testing.assert_close(gradient, true, rtol=1e-12, atol=1e-12)


@either_checkpoint
def test_checkpointing_in_evaluation_after_training(use_reentrant):
    gradients = []
    for run in (lambda layer, x: layer(x), with_checkpoint(use_reentrant)):
        layer, _ = trained(lambda layer, x: layer(x), steps=1)
        before = layer.mechanism.centroids.clone()
        x = torch.randn(2, 30, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()
        run(layer.eval(), x).sin().sum().backward()
        assert torch.equal(layer.mechanism.centroids, before)
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


def test_gradients_of_shared_heads_are_added_in_full_precision():
    """In bfloat16, those of a key-value head equal the ones in float32, rounded once."""
    module = sq.Routing(clusters=1, chunk=33).build(heads=8, kv_heads=1, head_dim=16)
    query, key, value = (torch.randn(1, heads, 19, 16).bfloat16() for heads in (8, 1, 1))
    grads = []
    for dtype in (torch.bfloat16, torch.float32):
        x = value.to(dtype).requires_grad_()
        with dispatch.disabled():
            out = module(query.to(dtype), key.to(dtype), x)
        grads += torch.autograd.grad(out.float().sum(), x)
    assert torch.equal(grads[0], grads[1].bfloat16())
