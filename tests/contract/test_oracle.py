"""Contract 1, 2, 6, 7: equal to the reference, gradients too, at any length; zeros where there is nothing to attend to."""

import pytest
import torch

from subquad.engines import clustered, hybrid, kernelized
from subquad.engines.block_sparse import softmax as tiles
from tests.harness import HEADS, ROUNDING, SIZES, VALUE_DIM, Inputs, assert_close, every_case, inputs


@pytest.fixture(params=["one piece", "many pieces"])
def pieces(request, monkeypatch):
    if request.param == "many pieces":
        monkeypatch.setattr(kernelized, "_PIECE_FEATURES", 1)
        monkeypatch.setattr(kernelized, "_MIN_PIECE_ROWS", 1)
        monkeypatch.setattr(tiles, "_PIECE", 1)
        monkeypatch.setattr(clustered, "_PIECE", 1)
        monkeypatch.setattr(hybrid, "_PIECE_PAIRS", 1)
        monkeypatch.setattr(hybrid, "_SHORT", 0)


@every_case
@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_equals_reference(case, size, pieces):
    x = inputs(size)
    for is_causal in case.directions:
        assert_close(case.run(x, is_causal=is_causal), case.reference(x, is_causal=is_causal))


@every_case
@pytest.mark.parametrize(("queries", "keys"), [(1, 300), (2, 1), (7, 65), (63, 127), (64, 2), (65, 64), (127, 7), (300, 63)])
@torch.no_grad()
def test_cross_equals_reference(case, queries, keys, pieces):
    case.skip_unless(cross=True)
    x = inputs(queries, keys)
    assert_close(case.run(x), case.reference(x))


@every_case
@torch.no_grad()
def test_scale_equals_reference(case):
    case.skip_unless(scale=True)
    x = inputs(65)
    for is_causal in case.directions:
        assert_close(case.run(x, is_causal=is_causal, scale=0.3), case.reference(x, is_causal=is_causal, scale=0.3))


@every_case
@pytest.mark.parametrize("shape", [(), (70,), (70, 70), (1, 70), (70, 1), (1, 1, 70, 70), (2, 1, 70, 70), (2, 3, 1, 70)])
@pytest.mark.parametrize("kind", ["bool", "float"])
@torch.no_grad()
def test_attn_mask_equals_reference(case, shape, kind):
    case.skip_unless(attn_mask=True)
    x = inputs(70)
    real = torch.rand(2, 70) < 0.8
    mask = torch.rand(shape) < 0.5 if kind == "bool" else torch.randn(shape, dtype=torch.float64)
    for is_causal in case.directions:
        for padding in (None, real):
            options = {"is_causal": is_causal, "attn_mask": mask, "key_padding_mask": padding}
            assert_close(case.run(x, **options), case.reference(x, **options))


@every_case
def test_gradcheck(case):
    module = case.build()
    names = [name for name, _ in module.named_parameters()]
    for is_causal in case.directions:
        x = inputs(4, batch=1, grad=True)

        def run(query, key, value, hidden, *parameters, is_causal=is_causal):
            x = Inputs(query, key, value, hidden)
            weights = dict(zip(names, parameters, strict=True))
            return case.run(x, lambda *a, **k: torch.func.functional_call(module, weights, a, k), is_causal=is_causal)

        parameters = [p.detach().clone().requires_grad_() for p in module.parameters()]
        assert torch.autograd.gradcheck(run, (*x, *parameters))


@every_case
@pytest.mark.parametrize("size", [65, 150])
def test_gradients_equal_reference(case, size):
    module = case.build()
    for is_causal in case.directions:
        x = inputs(size, grad=True)
        wrt = [*x, *module.parameters()]
        target = torch.randn(2, HEADS, size, VALUE_DIM, dtype=torch.float64)
        found, expected = (
            torch.autograd.grad((run(x, is_causal=is_causal) * target).sum(), wrt, allow_unused=True)
            for run in (case.run, case.reference)
        )
        largest = max(grad.abs().max() for grad in expected if grad is not None)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is None:
                continue
            if theirs.abs().max() < ROUNDING * largest:  # zero but for rounding, as is that of a bias on all keys
                assert ours.abs().max() < ROUNDING * largest
            else:
                assert_close(ours, theirs)


@every_case
def test_no_tokens(case):
    for is_causal in case.directions:
        assert case.run(inputs(0), is_causal=is_causal).shape == (2, HEADS, 0, VALUE_DIM)
    if not case.why_not(decode=True):
        out, state = case.run(inputs(0), is_causal=True, return_state=True)
        x = inputs(9)
        assert out.shape == (2, HEADS, 0, VALUE_DIM)
        assert_close(case.run(x, is_causal=True, state=state), case.run(x, is_causal=True))


@every_case
def test_no_tokens_keep_the_graph(case):
    for is_causal in case.directions:
        case.run(inputs(0, grad=True), is_causal=is_causal).sum().backward()


@every_case
def test_empty_batch(case):
    for is_causal in case.directions:
        assert case.run(inputs(5, batch=0), is_causal=is_causal).shape == (0, HEADS, 5, VALUE_DIM)


@every_case
def test_no_keys_give_zeros(case):
    case.skip_unless(cross=True)
    out = case.run(inputs(5, 0))
    assert out.shape == (2, HEADS, 5, VALUE_DIM)
    assert (out == 0).all()


@every_case
@pytest.mark.parametrize("size", [9, 70])
def test_nothing_to_attend_to_gives_zeros_and_finite_gradients(case, size):
    case.skip_unless(key_padding_mask=True)
    real = torch.ones(2, size, dtype=torch.bool)
    real[0] = False
    real[1, :4] = False
    for is_causal in case.directions:
        x = inputs(size, grad=True)
        out = case.run(x, is_causal=is_causal, key_padding_mask=real)
        assert (out[0] == 0).all()
        assert not is_causal or (out[1, :, :4] == 0).all()
        assert (out[1, :, 4:] != 0).any()
        wrt = [*x, *case.build().parameters()]
        for grad in torch.autograd.grad(out.sum(), wrt, allow_unused=True):
            assert grad is None or grad.isfinite().all()
