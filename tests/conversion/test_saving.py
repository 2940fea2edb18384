"""`save_pretrained` of a converted model, and `from_pretrained` in another process."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

import subquad as sq
from tests.conversion import families

_ELSEWHERE = """
import sys
{order}
import torch, transformers
from tests.conversion import families
for name, auto in {auto}.items():
    model = getattr(transformers, auto).from_pretrained(sys.argv[1] + "/" + name)
    torch.save(families.outputs(model, families.inputs(name)), sys.argv[1] + "/" + name + ".pt")
"""
_AUTO = {"llama": "AutoModelForCausalLM", "bert": "AutoModel", "bart": "AutoModelForSeq2SeqLM"}
_METHODS = {"llama": "rfa", "bert": "performer", "bart": "rfa"}


@pytest.mark.parametrize("order", ["import subquad", "import transformers, subquad"])
def test_bit_equal_in_another_process(order, tmp_path):
    expected = {}
    for name, method in _METHODS.items():
        model = sq.convert(families.model(name), method)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.01)
        model.save_pretrained(tmp_path / name)
        expected[name] = families.outputs(model, families.inputs(name))
    code = _ELSEWHERE.format(order=order, auto=_AUTO)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)
    for name, outputs in expected.items():
        assert torch.equal(torch.load(tmp_path / f"{name}.pt"), outputs), name


def test_another_head_on_the_same_layers(tmp_path):
    model, given = sq.convert(families.model("llama"), "rfa"), families.inputs("llama")
    model.save_pretrained(tmp_path)
    with pytest.raises(sq.InputError, match=r"surplus: lm_head"):
        AutoModel.from_pretrained(tmp_path)
    model.model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(families.outputs(loaded, given), families.outputs(model.model, given))


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
    with pytest.raises(sq.InputError, match=r"missing: model\.layers\.0\.self_attn\.subquad"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_surplus_weights_are_an_error(saved):
    change(saved, lambda weights: weights.update({"model.layers.0.self_attn.subquad.other": torch.ones(2)}))
    with pytest.raises(sq.InputError, match=r"surplus: model\.layers\.0\.self_attn\.subquad\.other"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_a_conversion_by_another_version(saved):
    config = json.loads((saved / "config.json").read_text())
    config["subquad"]["version"] = 99
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(sq.InputError, match="another version"):
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
