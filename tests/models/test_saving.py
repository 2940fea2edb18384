"""Saved and loaded again: the same bits, by class and by Auto class, here and in a new process; nothing missing goes unsaid."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import subquad as sq
from subquad.attention import MechanismModule
from subquad.models import (
    SubquadConfig,
    SubquadForCausalLM,
    SubquadForConditionalGeneration,
    SubquadForImageClassification,
    SubquadForMaskedLM,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
    SubquadModel,
)
from tests.models.small import DECODABLE, METHODS, causal_lm, config, every, tokens

AUTO = {
    AutoModel: SubquadModel,
    AutoModelForCausalLM: SubquadForCausalLM,
    AutoModelForMaskedLM: SubquadForMaskedLM,
    AutoModelForSeq2SeqLM: SubquadForConditionalGeneration,
    AutoModelForSequenceClassification: SubquadForSequenceClassification,
    AutoModelForTokenClassification: SubquadForTokenClassification,
    AutoModelForImageClassification: SubquadForImageClassification,
}


def output(model):
    with torch.no_grad():
        if isinstance(model, SubquadForImageClassification):
            return model(torch.ones(2, 3, 8, 8)).logits
        ids, mask = tokens()
        if isinstance(model, SubquadForConditionalGeneration):
            return model(ids, mask, ids).logits
        out = model(ids, mask)
        return out.last_hidden_state if isinstance(model, SubquadModel) else out.logits


@pytest.mark.parametrize("auto", AUTO, ids=lambda auto: auto.__name__)
def test_auto_classes_load_what_each_class_saved(auto, tmp_path):
    torch.manual_seed(0)
    model = AUTO[auto](config("performer", image_size=8)).eval()
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is AUTO[auto]
    assert torch.equal(output(loaded), output(model))
    assert type(AutoConfig.from_pretrained(tmp_path)) is SubquadConfig


@every(METHODS)
def test_every_mechanism_is_bit_equal_after_reload(method, tmp_path):
    torch.manual_seed(0)
    model = (SubquadForCausalLM if method in DECODABLE else SubquadForMaskedLM)(config(method)).eval()
    model.save_pretrained(tmp_path)
    torch.manual_seed(9)  # what is drawn now must not matter
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.self_methods == model.config.self_methods
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True))
    assert torch.equal(output(loaded), output(model))


def test_a_new_process_gives_the_same_bits(tmp_path):
    model = causal_lm(["performer", sq.BigBird(block=4)], dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    torch.save((tokens(), output(model)), tmp_path / "expected.pt")
    code = """
import sys, torch, subquad.models
from transformers import AutoModelForCausalLM
torch.set_num_threads(int(sys.argv[2]))
(ids, mask), expected = torch.load(sys.argv[1] + "/expected.pt")
with torch.no_grad():
    print(torch.equal(AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model")(ids, mask).logits, expected))
"""
    command = [sys.executable, "-c", code, str(tmp_path), str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_a_redrawn_mechanism_keeps_its_draw(tmp_path):
    model = causal_lm([sq.BigBird(block=2, window=1, globals=1), "performer"], dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, MechanismModule):
            module.redraw(17)
    model.save_pretrained(tmp_path)
    loaded = SubquadForCausalLM.from_pretrained(tmp_path)
    assert [m.method.seed for m in loaded.modules() if isinstance(m, MechanismModule)] == [17, 17]
    assert torch.equal(output(loaded), output(model))


def test_the_method_survives_in_json(tmp_path):
    longformer = sq.Longformer(window=3, dilation=(1, 2, 1))
    by_layer = [longformer, "linear", sq.Performer(features=16), "softmax"]
    for method, expected in (
        ("linear", [sq.Linear()] * 4),
        (longformer, [longformer] * 4),
        (by_layer, [longformer, sq.Linear(), sq.Performer(features=16), sq.Softmax()]),
        ("linear, softmax every 2nd layer", [sq.Linear(), sq.Softmax()] * 2),
        ("linear, softmax every 3rd layer", [sq.Linear(), sq.Linear(), sq.Softmax(), sq.Linear()]),
    ):
        saved = config(method, num_hidden_layers=4)
        assert saved.self_methods == expected
        saved.save_pretrained(tmp_path)
        assert SubquadConfig.from_pretrained(tmp_path).self_methods == expected
        assert SubquadConfig.from_dict(saved.to_dict()).self_methods == expected


def test_a_saved_config_holds_every_option(tmp_path):
    config("performer, bigbird every 2nd layer").save_pretrained(tmp_path)
    first, second = json.loads((tmp_path / "config.json").read_text())["method"]
    assert first == {"name": "performer", **vars(sq.Performer())}
    assert second["name"] == "bigbird"
    assert second["block"] == sq.BigBird().block


@pytest.fixture
def saved(tmp_path):
    model = causal_lm("rfa", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    return tmp_path


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_missing_weights_are_named(saved):
    change_weights(saved, lambda weights: weights.pop("model.layers.1.self_attn.q_proj.weight"))
    with pytest.raises(sq.InputError, match=r"missing: model.layers.1.self_attn.q_proj.weight\n"):
        SubquadForCausalLM.from_pretrained(saved)
    with pytest.raises(sq.InputError, match=r"missing: model.layers.1.self_attn.q_proj.weight\n"):
        AutoModelForCausalLM.from_pretrained(saved)
    SubquadForCausalLM.from_pretrained(saved, strict=False)


def test_unexpected_weights_are_named(saved):
    change_weights(saved, lambda weights: weights.update({"model.layers.7.extra": torch.zeros(3)}))
    with pytest.raises(sq.InputError, match=r"unexpected: model.layers.7.extra\n"):
        SubquadForCausalLM.from_pretrained(saved)


def test_weights_of_another_shape_are_named(saved):
    change_weights(saved, lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}))
    for strict in (True, False):
        with pytest.raises(sq.InputError, match=r"of another shape: model.norm.weight \(3,\) instead of \(24,\)"):
            SubquadForCausalLM.from_pretrained(saved, strict=strict)
    SubquadForCausalLM.from_pretrained(saved, ignore_mismatched_sizes=True)


def test_another_method_has_other_weights(saved):
    with pytest.raises(sq.InputError, match=r"(?s)unexpected: .*mechanism.sigma"):
        SubquadForCausalLM.from_pretrained(saved, config=config("softmax"))


def test_a_new_head_starts_anew_only_if_asked_for(saved):
    with pytest.raises(sq.InputError, match=r"(?s)missing: classifier.bias, classifier.weight.*strict=False"):
        SubquadForSequenceClassification.from_pretrained(saved)
    model = SubquadForSequenceClassification.from_pretrained(saved, strict=False)
    assert model.config.is_decoder  # it reads as the model that was saved does
    trunk = SubquadForCausalLM.from_pretrained(saved).model
    assert all(torch.equal(a, b) for a, b in zip(model.model.state_dict().values(), trunk.state_dict().values(), strict=True))


# One whose queries and keys are one tensor has other projections than softmax.
@every([method for method in METHODS if (method.info.parameters or method.info.random) and not method.shares_query_and_key])
def test_missing_parts_of_a_mechanism_start_as_in_a_new_model(method, tmp_path):
    torch.manual_seed(0)
    softmax = SubquadForMaskedLM(config("softmax", num_hidden_layers=1)).eval()
    softmax.save_pretrained(tmp_path)
    other = config(method, num_hidden_layers=1)
    loaded = SubquadForMaskedLM.from_pretrained(tmp_path, config=other, strict=False)
    (mechanism,) = (m for m in loaded.modules() if isinstance(m, MechanismModule))
    for name, initial in mechanism.initial_weights().items():
        found = mechanism.get_parameter(name) if name in mechanism._parameters else mechanism.get_buffer(name)
        assert found.isfinite().all()
        if name in mechanism._buffers:
            assert torch.equal(found, initial.to(found.dtype))
        else:
            torch.testing.assert_close(found.std(), initial.std(), rtol=0.5, atol=1e-3)


def test_weights_are_tied_and_saved_once(tmp_path):
    model = causal_lm("linear")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = SubquadForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    untied = causal_lm("linear", tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    translator = SubquadForConditionalGeneration(config("linear"))
    assert translator.encoder.embed_tokens.weight is translator.decoder.embed_tokens.weight is translator.lm_head.weight


def test_vocabulary_can_grow():
    model = causal_lm("linear")
    model.resize_token_embeddings(60)
    assert model.config.vocab_size == model.lm_head.out_features == 60
    assert model(torch.tensor([[59]])).logits.shape == (1, 1, 60)


def test_the_vocabulary_of_an_encoder_decoder_can_grow():
    model = SubquadForConditionalGeneration(config("linear"))
    model.resize_token_embeddings(60)
    assert model(torch.tensor([[59]]), labels=torch.tensor([[58]])).logits.shape == (1, 1, 60)
    model.resize_token_embeddings(20)
    with pytest.raises(sq.InputError, match="0 to 19; got 30"):
        model(torch.tensor([[30]]), labels=torch.tensor([[3]]))


def test_the_model_inside_follows_the_config():
    model = causal_lm("linear")
    assert model.model.config is model.config
    model.config.use_cache, model.config.output_hidden_states = False, True
    out = model(tokens()[0])
    assert out.past_key_values is None
    assert len(out.hidden_states) == 3


def test_half_precision_is_loaded_as_it_was_saved(tmp_path):
    model = causal_lm("performer", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = SubquadForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(output(loaded), output(model))


def test_built_without_memory():
    with torch.device("meta"):
        model = SubquadForCausalLM(config("performer"))
        logits = model(torch.zeros(2, 7, dtype=torch.int64)).logits
    assert logits.is_meta
    assert logits.shape == (2, 7, 53)
