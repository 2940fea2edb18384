"""`convert` and `revert`, on every family of models."""

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import subquad as sq
from subquad.models.converted.sites import sites
from tests.conversion import families


@pytest.fixture(scope="module", params=families.NAMES)
def family(request):
    """Its name, a model, what the model reads, and what it makes of that."""
    model, given = families.model(request.param), families.inputs(request.param)
    return request.param, model, given, families.outputs(model, given)


def taken(name, model, method):
    """The converted model; None for a family that must refuse the method, and does."""
    if name in families.SOFTMAX_ONLY or (isinstance(method, sq.Nystrom) and name not in families.ENCODERS):
        with pytest.raises(sq.UnsupportedError, match="nothing was converted"):
            sq.convert(model, method, copy=True)
        return None
    return sq.convert(model, method, copy=True)


def test_softmax_changes_no_output_beyond_rounding(family):
    _, model, given, before = family
    after = families.outputs(sq.convert(model, "softmax", copy=True), given)
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()


def test_softmax_under_autocast_errs_no_more_than_the_original_does(family):
    _, model, given, before = family
    converted = sq.convert(model, "softmax", copy=True)
    with torch.autocast("cpu", torch.bfloat16):
        own, after = (families.outputs(which, given).float() for which in (model, converted))
    assert 0 < (after - before).abs().max() <= 2 * (own - before).abs().max()


@pytest.mark.parametrize("method", ["linear", "performer", "local", "rfa", sq.Nystrom(landmarks=2)])
def test_another_method_is_that_method_and_is_undone_bit_for_bit(family, method):
    name, model, given, before = family
    converted = taken(name, model, method)
    if converted is None:
        return
    after = families.outputs(converted, given)
    is_exact = method == "local" and name != "mistral with a window"  # the window is wider than the sequence
    assert torch.allclose(after, before, atol=1e-5) == is_exact
    assert torch.equal(families.outputs(model, given), before), "the original of a copy is left alone"
    reverted = sq.revert(converted)
    assert torch.equal(families.outputs(reverted, given), before)
    assert list(reverted.state_dict()) == list(model.state_dict())
    assert reverted.config.to_dict() == model.config.to_dict()


@pytest.mark.parametrize("method", ["linear", "rfa"])
def test_pads_do_not_matter(family, method):
    name, model, given, _ = family
    if name in families.WITHOUT_MASK:
        assert "attention_mask" not in given
        return
    converted = taken(name, model, method)
    if converted is None:
        return
    other = dict(given)
    other["input_ids"] = torch.where(given["attention_mask"].bool(), given["input_ids"], 5)
    assert torch.equal(families.outputs(converted, given), families.outputs(converted, other)), name


def test_in_place_by_default():
    model = families.model("bert")
    assert sq.convert(model, "linear") is model
    assert type(model.encoder.layer[0].attention.self.subquad) is sq.MechanismModule


def test_original_weight_names_stay():
    model = families.model("llama")
    names = set(model.state_dict())
    added = set(sq.convert(model, "rfa").state_dict()) - names
    assert set(model.state_dict()) >= names
    assert added
    assert all(".self_attn.subquad." in name for name in added)


def test_parameters_are_trained():
    model = sq.convert(families.model("llama"), "rfa").train()
    given = families.inputs("llama")
    model(**given, labels=given["input_ids"]).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".subquad." in name)


@pytest.mark.parametrize(
    ("options", "converted"),
    [
        ({}, [0, 1, 2]),
        ({"layers": [0, 2]}, [0, 2]),
        ({"layers": "every 2"}, [0, 2]),
        ({"keep_softmax": [1]}, [0, 2]),
        ({"layers": "every 2", "keep_softmax": [2]}, [0]),
    ],
)
def test_which_layers(options, converted):
    model = sq.convert(families.model("llama"), "linear", **options)
    kinds = [layer.self_attn.subquad.method for layer in model.model.layers]
    assert [i for i, kind in enumerate(kinds) if kind == sq.Linear()] == converted
    assert all(kind == sq.Softmax() for i, kind in enumerate(kinds) if i not in converted)


def test_cross_attention_is_left_alone_unless_asked_for():
    def kinds(model):
        return {(site.is_cross, type(site.module.subquad.method)) for site in sites(model)}

    assert kinds(sq.convert(families.model("bart"), "linear")) == {(False, sq.Linear), (True, sq.Softmax)}
    assert kinds(sq.convert(families.model("bart"), "linear", self_only=False)) == {(False, sq.Linear), (True, sq.Linear)}


def test_attention_dropout_goes_to_the_output_where_there_are_no_weights():
    config = BertConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=32, hidden_dropout_prob=0)
    for method in ("linear", "softmax"):
        model = sq.convert(BertModel(config), method).train()
        ids = torch.arange(9)[None]
        first, second = (model(input_ids=ids).last_hidden_state for _ in range(2))
        assert not torch.equal(first, second)
        model.eval()
        assert torch.equal(*(model(input_ids=ids).last_hidden_state for _ in range(2)))


def test_packed_sequences_need_a_method_that_masks_pairs():
    model = families.model("llama")
    positions = torch.tensor([[*range(5), *range(7)]])
    given = {"input_ids": torch.arange(3, 15)[None], "position_ids": positions, "use_cache": False}
    before = families.outputs(model, given)
    softmax = sq.convert(model, "softmax", copy=True)
    assert torch.allclose(families.outputs(softmax, given), before, atol=1e-6)
    with pytest.raises(sq.UnsupportedError, match="attn_mask"):
        families.outputs(sq.convert(model, "linear"), given)


class TestRefusals:
    """Each leaves the model as it was."""

    @pytest.fixture(params=["in place", "copy"])
    def refused(self, request):
        def check(model, method, match, error=sq.SubquadError, **options):
            names, attention = list(model.state_dict()), model.config._attn_implementation
            with pytest.raises(error, match=match):
                sq.convert(model, method, copy=request.param == "copy", **options)
            assert list(model.state_dict()) == names
            assert model.config._attn_implementation == attention
            assert not hasattr(model.config, "subquad")

        return check

    def test_layers_are_named(self, refused):
        refused(families.model("llama"), "nystrom", r"layers\.0\.self_attn, layers\.1\.self_attn.*causal", sq.UnsupportedError)

    def test_a_bias_of_positions(self, refused):
        refused(families.model("t5"), "linear", r"SelfAttention.*relative position bias", sq.UnsupportedError)

    def test_a_window_of_the_model(self, refused):
        refused(families.model("mistral with a window"), "linear", "sliding window of 7 tokens", sq.UnsupportedError)

    def test_one_tensor_for_queries_and_keys(self, refused):
        refused(families.model("bert"), sq.Reformer(), "shared_qk=False", sq.UnsupportedError)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"layers": [7]}, "layers must be numbers of layers that the model has, 0 to 2"),
            ({"layers": [True]}, "layers must be numbers of layers that the model has, 0 to 2"),
            ({"layers": "some"}, "every 2"),
            ({"layers": "every 0"}, "every 2"),
            ({"keep_softmax": [0, 1, 2]}, "no layer is left"),
            ({"keep_softmax": [3]}, "keep_softmax must be numbers of layers that the model has, 0 to 2"),
        ],
    )
    def test_unknown_layers(self, refused, options, match):
        refused(families.model("llama"), "linear", match, **options)

    def test_an_unknown_method(self, refused):
        refused(families.model("llama"), "liner", "linear")

    def test_something_else(self):
        with pytest.raises(sq.InputError, match="PreTrainedModel; got Linear"):
            sq.convert(torch.nn.Linear(2, 2), "linear")

    def test_an_unsupported_architecture(self):
        from transformers import BloomConfig, BloomModel

        model = BloomModel(BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2))
        with pytest.raises(sq.UnsupportedError, match=r"BloomModel.*bert.*llama"):
            sq.convert(model, "linear")

    def test_twice(self):
        model = sq.convert(families.model("bert"), "linear")
        with pytest.raises(sq.InputError, match="converted already"):
            sq.convert(model, "performer")
        assert model.encoder.layer[0].attention.self.subquad.method == sq.Linear()

    def test_a_quantized_model(self, refused):
        model = families.model("llama")
        projection = model.model.layers[1].self_attn.q_proj
        projection.weight = torch.nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
        refused(model, "linear", "quantized", sq.UnsupportedError)

    @pytest.mark.parametrize("layers", [1, None, 2.5])
    def test_layers_that_are_no_list(self, layers):
        with pytest.raises(sq.OptionError, match="layers must be a list of layer numbers; got"):
            sq.convert(families.model("llama"), "linear", layers=layers)

    def test_another_attention(self):
        model, given = sq.convert(families.model("llama"), "linear"), families.inputs("llama")
        before = families.outputs(model, given)
        with pytest.raises(sq.InputError, match=r"its mechanisms; got attn_implementation='eager'\. Call subquad\.revert"):
            model.set_attn_implementation("eager")
        assert torch.equal(families.outputs(model, given), before)
        sq.revert(model).set_attn_implementation("eager")

    def test_our_own_models(self):
        config = sq.models.SubquadConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        with pytest.raises(sq.InputError, match="is a subquad model"):
            sq.convert(sq.models.SubquadModel(config), "linear")

    def test_revert_without_convert(self):
        with pytest.raises(sq.InputError, match="not converted"):
            sq.revert(LlamaForCausalLM(LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)))
