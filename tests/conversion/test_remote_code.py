"""Code in a model folder does not run, whatever its configs ask for."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import subquad as sq
from subquad.cli import app

SAVED = Path(__file__).parents[1] / "saved"
CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")


@pytest.fixture
def folder(tmp_path):
    """A model with code that leaves a mark beside it."""
    shutil.copytree(SAVED / "llama", tmp_path / "model")
    code = f"open({str(tmp_path / 'executed')!r}, 'w').close()\nclass Evil: pass\n"
    (tmp_path / "model" / "evil.py").write_text(code)
    (tmp_path / "model" / "custom_generate").mkdir()
    (tmp_path / "model" / "custom_generate" / "generate.py").write_text(code)
    return tmp_path / "model"


def change(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def generate(folder):
    done = CliRunner().invoke(app, ["generate", str(folder), "1 2 3", "--max-new-tokens", "2"], input="y\ny\n")
    assert not (folder.parent / "executed").exists()
    if done.exception is not None:
        raise done.exception


def test_code_for_known_classes_is_not_needed(folder):
    change(folder / "config.json", auto_map=dict.fromkeys(CLASSES, "evil.Evil"))
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    generate(folder)


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("config.json", {"model_type": "evil", "auto_map": dict.fromkeys(CLASSES, "evil.Evil")}, "does not hold a Hugging Face model"),
        ("tokenizer_config.json", {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil"] * 2}}, "no tokenizer can be loaded"),
        ("config.json", {"attn_implementation": "some/kernel"}, "asks for an attention kernel from the hub, 'some/kernel'; subquad"),
        ("config.json", {"transformers_weights": "adapter_model.bin"}, "transformers_weights in .* must be a safetensors file"),
        ("config.json", {"architectures": ["Trainer"]}, "Trainer has no head that generates text"),
        ("config.json", {"architectures": [7]}, "LlamaModel has no head that generates text"),
    ],
)  # fmt: skip
def test_what_needs_code_is_refused(folder, file, changes, said):
    change(folder / file, **changes)
    with pytest.raises(sq.InputError, match=said):
        generate(folder)
