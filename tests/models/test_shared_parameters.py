"""Parameters that layers of a model share: one of them, saved once, trained by all."""

import copy

import pytest
import torch

import subquad as sq

pytest.importorskip("transformers", reason="pip install 'subquad[hf]', for the models")
from safetensors.torch import load_file

from subquad.models import SubquadConfig, SubquadForConditionalGeneration, SubquadForMaskedLM, SubquadModel
from tests.harness import assert_close

RANK, COLUMNS, LENGTH = 3, 23, 7
LENT = sq.Linformer(rank=RANK, max_length=COLUMNS, share="layer")


def config(method=LENT, **options):
    sizes = {"hidden_size": 10, "intermediate_size": 13, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 17}
    return SubquadConfig(**{**sizes, "method": method, "position": "none", **options})


def build(method=LENT, cls=SubquadModel, **options):
    return cls(config(method, **options)).double().eval()


def ids(seed=1):
    return torch.randint(17, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def hidden(model):
    return model(ids()).last_hidden_state


def matrices(model):
    return [name for name, _ in model.named_parameters() if name.endswith(".projection")]


def test_a_model_has_one_matrix():
    model, own = build(), build(sq.Linformer(rank=RANK, max_length=COLUMNS, share="kv"))
    assert matrices(model) == ["layers.0.self_attn.mechanism.projection"]
    assert len(matrices(own)) == 3
    assert own.num_parameters() - model.num_parameters() == 2 * RANK * COLUMNS
    assert [name for name in model.state_dict() if "projection" in name] == matrices(model)


def as_kv(model):
    """The same model with a matrix in each layer, all of the same values."""
    own = build(sq.Linformer(rank=RANK, max_length=COLUMNS, share="kv"))
    weights = model.state_dict()
    for layer in range(3):
        weights[f"layers.{layer}.self_attn.mechanism.projection"] = weights["layers.0.self_attn.mechanism.projection"].clone()
    own.load_state_dict(weights)
    return own


@torch.no_grad()
def test_every_layer_uses_the_matrix():
    model = build()
    assert_close(hidden(model), hidden(as_kv(model)))
    model.layers[0].self_attn.mechanism.projection.mul_(-1.5)
    assert_close(hidden(model), hidden(as_kv(model)))


def test_its_gradient_is_the_sum_over_layers():
    model = build()
    own = as_kv(model)
    for each in (model, own):
        out = hidden(each)
        (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    parts = [layer.self_attn.mechanism.projection.grad for layer in own.layers]
    assert all(part.norm() > 1e-3 * sum(parts).norm() for part in parts)
    assert_close(model.layers[0].self_attn.mechanism.projection.grad, sum(parts))


def reloaded(model, path):
    model.save_pretrained(path)
    loaded, weights = type(model).from_pretrained(path, dtype=torch.float64).eval(), model.state_dict()
    assert loaded.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in loaded.state_dict().items())
    return loaded


@torch.no_grad()
def test_saved_once_and_loaded_bit_equal(tmp_path):
    model = build(cls=SubquadForMaskedLM)
    model.model.layers[0].self_attn.mechanism.projection.add_(0.25)
    loaded = reloaded(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert [name for name in saved if "projection" in name] == ["model.layers.0.self_attn.mechanism.projection"]
    assert matrices(loaded) == matrices(model)
    assert_close(loaded(ids()).logits, model(ids()).logits)
    for each in (loaded, model):  # still shared
        each.model.layers[0].self_attn.mechanism.projection.mul_(-3)
    assert_close(loaded(ids()).logits, model(ids()).logits)


@torch.no_grad()
def test_a_copy_is_independent():
    """All layers of the copy follow its own matrix, and none the original's."""
    model = build()
    before, twin = hidden(model), copy.deepcopy(model)
    assert torch.equal(hidden(twin), before)
    twin.layers[0].self_attn.mechanism.projection.add_(1)
    assert torch.equal(hidden(model), before)
    assert_close(hidden(twin), hidden(as_kv(twin)))
    assert not torch.equal(hidden(twin), before)
    model.layers[0].self_attn.mechanism.projection.zero_()
    assert_close(hidden(twin), hidden(as_kv(twin)))


@torch.no_grad()
def test_different_options_are_lent_separately():
    other = sq.Linformer(rank=5, max_length=COLUMNS, share="layer")
    model = build(["softmax", other, LENT, other, LENT], num_hidden_layers=5)
    assert matrices(model) == [f"layers.{layer}.self_attn.mechanism.projection" for layer in (1, 2)]
    lenders = [model.layers[layer].self_attn.mechanism for layer in (1, 2)]
    for layer, lender in ((3, lenders[0]), (4, lenders[1])):
        (used,) = model.layers[layer].self_attn.mechanism._weights().values()
        assert used is lender.projection
    assert [tuple(lender.projection.shape) for lender in lenders] == [(5, COLUMNS), (RANK, COLUMNS)]


def test_what_is_not_shared_across_layers_is_not_lent():
    model = build(sq.Linformer(rank=RANK, max_length=COLUMNS, share="kv"))
    assert all(layer.self_attn.mechanism._lender is None for layer in model.layers)


def test_encoder_and_cross_attention_each_have_a_matrix(tmp_path):
    options = {"decoder_method": "linear", "cross_method": LENT}
    model = build(cls=SubquadForConditionalGeneration, **options)
    expected = ["encoder.layers.0.self_attn.mechanism.projection", "decoder.layers.0.cross_attn.mechanism.projection"]
    assert matrices(model) == expected
    logits = model(ids(), decoder_input_ids=ids(2)).logits
    logits.square().sum().backward()
    assert all(model.get_parameter(name).grad.norm() > 0 for name in expected)
    loaded = reloaded(model, tmp_path)
    assert matrices(loaded) == expected
    assert_close(loaded(ids(), decoder_input_ids=ids(2)).logits, logits)


def test_parameters_are_lent_between_equals():
    first, second = (sq.Attention(10, 2, sq.Linformer(rank=rank, max_length=COLUMNS)) for rank in (3, 5))
    with pytest.raises(sq.InputError, match=r"of the same mechanism and sizes only; got .*rank=3.* for .*rank=5"):
        second.mechanism.borrow_parameters(first.mechanism)
