"""Converted models saved and loaded: by transformers and by `subquad.load`, in this process and in others."""

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
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import subquad as sq
from tests.conversion import families

_AUTO = {"llama": "AutoModelForCausalLM", "bert": "AutoModel", "bart": "AutoModelForSeq2SeqLM", "vit": "AutoModel"}
_METHODS = {"llama": "rfa", "bert": "performer", "bart": "rfa", "vit": "hedgehog"}


def python(code, *arguments):
    """The output of another process; its error, if it fails."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else done.stderr


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A folder with a converted model of each family, and its outputs."""
    path, expected = tmp_path_factory.mktemp("converted"), {}
    for name, method in _METHODS.items():
        model = sq.convert(families.model(name), method)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.01)
        model.save_pretrained(path / name)
        expected[name] = families.outputs(model, families.inputs(name))
    return path, expected


_LOAD = {
    "import subquad.models, transformers": "getattr(transformers, auto).from_pretrained(path)",
    "import transformers.modeling_utils, subquad": "getattr(transformers, auto).from_pretrained(path)",
    "import subquad, transformers": "subquad.load(path)",
}


@pytest.mark.parametrize("order", _LOAD)
def test_bit_equal_in_another_process(order, converted, tmp_path):
    path, expected = converted
    code = f"""
import sys
{order}
import torch
from tests.conversion import families
for name, auto in {_AUTO}.items():
    path = sys.argv[1] + "/" + name
    model = {_LOAD[order]}
    torch.save(families.outputs(model, families.inputs(name)), sys.argv[2] + "/" + name)
"""
    assert python(code, path, tmp_path) == ""
    for name, outputs in expected.items():
        assert torch.equal(torch.load(tmp_path / name), outputs), name


@pytest.mark.parametrize("model_class", ["AutoModelForCausalLM", "LlamaForCausalLM", "AutoModel"])
def test_a_process_without_subquad_refuses_it(model_class, converted):
    path, _ = converted
    said = python(
        f"import sys; from transformers import {model_class}; {model_class}.from_pretrained(sys.argv[1])", path / "llama"
    )
    assert 'ValueError: Specified `attn_implementation="subquad: this model was converted.' in said
    assert "Load it with subquad.load, or import subquad.models first" in said


def test_import_changes_nothing_in_transformers():
    code = """
import sys, transformers.modeling_utils as used
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers import auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
tables = {
    "quantizers": auto.AUTO_QUANTIZER_MAPPING, "quantization configs": auto.AUTO_QUANTIZATION_CONFIG_MAPPING,
    "attention": used.ALL_ATTENTION_FUNCTIONS, "model types": CONFIG_MAPPING,
}

def members(cls):
    return {name: id(value) for name, value in vars(cls).items() if not name.startswith("_abc")}

def state():
    classes = [used.PreTrainedModel, transformers.PreTrainedConfig, transformers.AutoModel, AutoModelForCausalLM, AutoConfig]
    classes += [auto.AutoHfQuantizer, transformers.GenerationMixin]
    return [members(cls) for cls in classes], list(sys.meta_path), list(sys.path_hooks), {n: set(t) for n, t in tables.items()}

import transformers
before = state()
import subquad
after = state()
assert before[:3] == after[:3]
print({name: sorted(after[3][name] - before[3][name]) for name in tables})
"""
    assert eval(python(code)) == {
        "quantizers": ["subquad"],
        "quantization configs": ["subquad"],
        "attention": ["subquad", sq.models.converted.record.SAVED_ATTENTION],
        "model types": ["subquad"],
    }


def test_the_saved_config(converted):
    path, _ = converted
    config = json.loads((path / "llama" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert config["quantization_config"] == {"quant_method": "subquad"}
    assert config["subquad"]["version"] == 2
    assert set(config["subquad"]["sites"]) == {f"layers.{layer}.self_attn" for layer in range(3)}
    loaded = AutoModelForCausalLM.from_pretrained(path / "llama")
    assert loaded.config._attn_implementation == "subquad"
    assert json.loads(loaded.config.to_json_string()) == config | {"transformers_version": loaded.config.transformers_version}


@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, sq.load])
def test_a_loaded_model_casts_saves_and_trains(load, converted, tmp_path):
    path, expected = converted
    model = load(path / "llama")
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(families.outputs(load(tmp_path / "again"), families.inputs("llama")), expected["llama"])
    assert {weight.dtype for weight in model.half().parameters()} == {torch.float16}
    assert {weight.dtype for weight in load(path / "llama", dtype=torch.float64).parameters()} == {torch.float64}
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, families.WORDS, (4, 9))]
    arguments = TrainingArguments(str(tmp_path / "run"), max_steps=2, report_to=[], save_strategy="no", use_cpu=True)
    model = model.float()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    Trainer(model, arguments, train_dataset=rows).train()
    assert all(not torch.equal(weight, before[name]) for name, weight in model.named_parameters() if ".subquad." in name)


@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, LlamaForCausalLM.from_pretrained, sq.load])
def test_another_attention_is_refused(load, converted):
    path, _ = converted
    with pytest.raises(sq.InputError, match=r"its mechanisms; got attn_implementation='sdpa'\. Leave it out"):
        load(path / "llama", attn_implementation="sdpa")
    assert load(path / "llama", attn_implementation="subquad").config._attn_implementation == "subquad"


def test_a_model_built_from_its_config_has_no_mechanisms(converted):
    path, _ = converted
    live = AutoModelForCausalLM.from_pretrained(path / "llama").config
    for config in (live, AutoConfig.from_pretrained(path / "llama")):
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(
            sq.InputError, match=r"must have a mechanism; LlamaAttention has none\. A config alone has no mechanisms"
        ):
            model(**families.inputs("llama"))


def test_another_head_on_the_same_layers(tmp_path):
    model, given = sq.convert(families.model("llama"), "rfa"), families.inputs("llama")
    model.save_pretrained(tmp_path)
    expected = families.outputs(model.model, given)
    assert torch.equal(families.outputs(AutoModel.from_pretrained(tmp_path), given), expected)
    classifier = LlamaForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(families.outputs(classifier.model, given), expected)
    model.model.save_pretrained(tmp_path)
    for load in (AutoModel.from_pretrained, sq.load):
        assert torch.equal(families.outputs(load(tmp_path), given), expected)


@pytest.fixture
def saved(tmp_path):
    sq.convert(families.model("llama"), "rfa").save_pretrained(tmp_path)
    return tmp_path


def change(path, edit):
    weights = load_file(path / "model.safetensors")
    edit(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def test_missing_weights_are_an_error(saved):
    name = next(name for name in load_file(saved / "model.safetensors") if ".subquad." in name)
    change(saved, lambda weights: weights.pop(name))
    for load in (AutoModelForCausalLM.from_pretrained, sq.load):
        with pytest.raises(sq.InputError, match=r"missing: model\.layers\.0\.self_attn\.subquad"):
            load(saved)


def test_unexpected_weights_are_an_error(saved):
    change(saved, lambda weights: weights.update({"model.layers.0.self_attn.subquad.other": torch.ones(2)}))
    for load in (AutoModelForCausalLM.from_pretrained, AutoModel.from_pretrained, sq.load):
        with pytest.raises(sq.InputError, match=r"unexpected: (model\.)?layers\.0\.self_attn\.subquad\.other"):
            load(saved)


def test_load_is_strict_about_all_weights(saved):
    change(saved, lambda weights: weights.update({"other.weight": torch.ones(2)}))
    with pytest.raises(sq.InputError, match=r"unexpected: other\.weight"):
        sq.load(saved)
    change(saved, lambda weights: weights.pop("other.weight"))
    change(saved, lambda weights: weights.update({"lm_head.weight": torch.ones(2, 2)}))
    with pytest.raises(sq.InputError, match=r"of another shape: lm_head\.weight \(2, 2\) instead of"):
        sq.load(saved)
    with pytest.raises(sq.InputError, match=r"as it was saved; got ignore_mismatched_sizes=True\. Use from_pretrained"):
        sq.load(saved, ignore_mismatched_sizes=True)
    change(saved, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(sq.InputError, match=r"missing: lm_head\.weight"):
        sq.load(saved)


def test_weights_are_compared_under_the_names_in_the_file(tmp_path):
    """ViT's layers have other names in files."""
    sq.convert(families.model("vit"), "hedgehog").save_pretrained(tmp_path)
    name = next(name for name in load_file(tmp_path / "model.safetensors") if ".subquad." in name)
    assert name not in families.model("vit").state_dict()
    AutoModel.from_pretrained(tmp_path)
    change(tmp_path, lambda weights: weights.pop(name))
    with pytest.raises(sq.InputError, match=r"missing: layers\.0\.attention"):
        AutoModel.from_pretrained(tmp_path)


def test_weights_of_mechanisms_of_another_shape_are_an_error(saved):
    name = next(name for name in load_file(saved / "model.safetensors") if ".subquad." in name)
    change(saved, lambda weights: weights.update({name: torch.ones(2, 2)}))
    with pytest.raises(sq.InputError, match=r"of another shape: model\.layers\.0\.self_attn\.subquad.* \(2, 2\) instead of"):
        AutoModelForCausalLM.from_pretrained(saved, ignore_mismatched_sizes=True)


def test_a_state_dict_is_refused(saved):
    model = sq.load(saved)
    with pytest.raises(sq.InputError, match=r"got a state_dict\. Pass it to model\.load_state_dict"):
        LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict())


def test_load_says_what_it_cannot_load(tmp_path):
    families.model("llama").save_pretrained(tmp_path)
    with pytest.raises(sq.InputError, match=r"loads converted models and subquad models; got .*, a llama model\. Load it with"):
        sq.load(tmp_path)
    with pytest.raises(sq.InputError, match="there is no folder"):
        sq.load(tmp_path / "nowhere")
    config = json.loads((tmp_path / "config.json").read_text())
    sq.convert(families.model("llama"), "linear").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["MyModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(sq.InputError, match="was saved by MyModel, which is neither in transformers nor in subquad"):
        sq.load(tmp_path)


def test_load_gives_the_class_that_saved_and_the_loading_info(saved, tmp_path):
    model, info = sq.load(str(saved), output_loading_info=True)
    assert type(model) is LlamaForCausalLM
    assert not info["missing_keys"]
    own = sq.models.SubquadForCausalLM(
        sq.models.SubquadConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, method="linear")
    )
    own.save_pretrained(tmp_path / "own")
    loaded = sq.load(tmp_path / "own")
    assert type(loaded) is sq.models.SubquadForCausalLM
    assert all(torch.equal(weight, own.state_dict()[name]) for name, weight in loaded.state_dict().items())


def test_an_ordinary_model_cannot_be_called_converted(tmp_path):
    families.model("llama").save_pretrained(tmp_path)
    with pytest.raises(sq.InputError, match="this one is not converted"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config={"quant_method": "subquad"})


def test_a_conversion_by_another_version(saved):
    config = json.loads((saved / "config.json").read_text())
    config["subquad"]["version"] = 99
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(sq.InputError, match="another version of subquad"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_a_loaded_model_generates_and_reverts(saved):
    loaded, given = AutoModelForCausalLM.from_pretrained(saved), families.inputs("llama")
    before = families.model("llama")
    assert families.generated(loaded, given).shape[1] == families.LENGTH + 9
    assert torch.equal(families.outputs(sq.revert(loaded), given), families.outputs(before, given))


def test_other_models_load_as_before(tmp_path):
    model = families.model("llama")
    model.save_pretrained(tmp_path)
    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
