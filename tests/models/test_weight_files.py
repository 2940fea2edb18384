"""Weights come only from valid safetensors files; each refusal names the file, and no pickle is ever loaded."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

import subquad as sq
from subquad.models import SubquadForCausalLM
from tests.models.small import causal_lm


class Touch:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture(scope="module")
def model():
    return causal_lm(dtype=torch.float32)


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


LOADERS = [SubquadForCausalLM.from_pretrained, sq.load]


def in_two_files(folder):
    """The same weights in two files and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for file in set(names.values()):
        save_file({name: weights[name] for name in weights if names[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return names


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("damage", ["cut", "header", "empty", "text", "length"])
def test_a_damaged_file_is_named(folder, load, damage):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    content = {
        "cut": whole[:-7],
        "header": whole[:20] + b"\xff\xff" + whole[22:],
        "empty": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\n",
        "length": b"\xff" * 8 + whole[8:],
    }[damage]
    path.write_bytes(content)
    with pytest.raises(
        sq.InputError, match=r"model/model\.safetensors is not a valid safetensors file: .*\. Get a new copy\.$"
    ):
        load(folder)


@pytest.mark.parametrize("load", LOADERS)
def test_weights_in_several_files(folder, model, load):
    in_two_files(folder)
    assert all(torch.equal(a, b) for a, b in zip(load(folder).state_dict().values(), model.state_dict().values(), strict=True))
    path = folder / "part-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(sq.InputError, match=r"part-1\.safetensors is not a valid safetensors file"):
        load(folder)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "is not valid JSON"),
        ("[]", "weight_map must be an object; got None"),
        ('{"weight_map": {"a": 3}}', r"weight_map\['a'\] must be text; got 3"),
        ('{"weight_map": {"a": "part.bin"}}', "must name only safetensors files beside it; got 'part.bin'"),
        ('{"weight_map": {"a": "../part.safetensors"}}', r"must name only safetensors files beside it; got '\.\./part"),
        ('{"weight_map": {"a": "part-7.safetensors"}}', "cannot be loaded: there is no 'metadata'"),
        ('{"weight_map": {"a": "part-7.safetensors"}, "metadata": {}}', "cannot be loaded: .*part-7"),
    ],
)
def test_an_index_of_something_else_is_refused(folder, load, index, said):
    in_two_files(folder)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(sq.InputError, match=said):
        load(folder)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "part.bin"])
@pytest.mark.parametrize("is_plain", [True, False])
def test_no_pickle_is_loaded(folder, load, name, is_plain, tmp_path):
    touched = tmp_path / "touched"
    weights = load_file(folder / "model.safetensors")
    if name == "part.bin":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(weights, name)}))
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / name) if is_plain else (folder / name).write_bytes(pickle.dumps(Touch(touched)))
    with pytest.raises(sq.InputError, match=rf"{name}.* If you trust the model, load it with transformers"):
        load(folder)
    assert not touched.exists()


@pytest.mark.parametrize("load", LOADERS)
def test_an_adapter_does_not_lead_to_another_model(folder, load):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/model", "peft_type": "LORA"}))
    with pytest.raises(sq.InputError, match=r"model has an adapter, adapter_config\.json, which is for another model\. Load"):
        load(folder)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("name", ["use_safetensors", "weights_only"])
def test_pickles_cannot_be_asked_for(folder, load, name):
    with pytest.raises(sq.InputError, match=rf"only from safetensors; got {name}=False\. Omit it"):
        load(folder, **{name: False})


def test_a_name_on_the_hub_keeps_the_error_of_hugging_face(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"huggingface\.co"):
        SubquadForCausalLM.from_pretrained("no/where", local_files_only=True)
