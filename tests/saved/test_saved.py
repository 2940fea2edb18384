"""Files that an earlier version wrote still load, continue and resume; README.md says how they were made."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad.bench import load

pytest.importorskip("transformers")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from subquad.cli import app
from subquad.models import SubquadForCausalLM

HERE = Path(__file__).parent
STATES = torch.load(HERE / "states.pt", weights_only=True)
MECHANISMS = [
    sq.Softmax(), sq.Linear(), sq.Performer(features=8), sq.Local(window=3), sq.Reformer(buckets=4, chunk=4, rounds=2),
    sq.Pooled(stride=3, window=2),
]  # fmt: skip


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of a folder, beside what its run reads; the working folder is where both are."""

    def copied(name):
        for one in (name, "llama"):
            shutil.copytree(HERE / one, tmp_path / one)
        shutil.copy(HERE / "counting.txt", tmp_path)
        monkeypatch.chdir(tmp_path)
        return tmp_path / name

    return copied


def command(*arguments):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def test_a_state_of_every_kind_is_kept():
    assert STATES["states"].keys() == {mechanism.info.name for mechanism in MECHANISMS}


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.info.name)
@torch.no_grad()
def test_states_continue(mechanism):
    kept, x = STATES["states"][mechanism.info.name], STATES["tokens"][:, :, 9:]
    state = sq.State.from_state_dict(kept["state"])
    assert state.length == 9
    torch.testing.assert_close(sq.attention(x, x, x, mechanism, is_causal=True, state=state), kept["next"])


@torch.no_grad()
def test_a_model_loads():
    model = SubquadForCausalLM.from_pretrained(HERE / "model").eval()
    assert model.config.self_methods == [sq.Performer(features=8, seed=3), sq.Hybrid(window=2)]
    expected = torch.load(HERE / "model" / "expected.pt", weights_only=True)
    torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"])


@torch.no_grad()
def test_a_converted_model_loads_and_is_saved_in_the_new_format(tmp_path):
    assert "quantization_config" not in json.loads((HERE / "converted" / "config.json").read_text())
    model = sq.load(HERE / "converted").eval()
    expected = torch.load(HERE / "converted" / "expected.pt", weights_only=True)
    logits = model(expected["ids"]).logits
    torch.testing.assert_close(logits, expected["logits"])
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["subquad"]["version"] == 2
    for load_model in (AutoModelForCausalLM.from_pretrained, sq.load):
        assert torch.equal(load_model(tmp_path)(expected["ids"]).logits, logits)


@torch.no_grad()
def test_a_converted_model_loads():
    model = sq.load(HERE / "converted").eval()
    expected = torch.load(HERE / "converted" / "expected.pt", weights_only=True)
    torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"])


def test_a_conversion_resumes(copy):
    folder = copy("conversion")
    before = json.loads((folder / "results.json").read_text())
    assert before["stages"]["lora"]["step"] == 4
    command(
        "convert", "llama", "--method", "hybrid", "--option", "window=2", "--text", "counting.txt", "--repair", "transfer,lora",
        "--length", "24", "--batch", "4", "--tokens", "2400", "--repair-option", "steps=6", "--repair-option", "rank=2",
        "--threads", "1", "--out", "conversion", "--resume",
    )  # fmt: skip
    after = json.loads((folder / "results.json").read_text())
    assert after["stages"]["transfer"] == before["stages"]["transfer"]  # not done again
    assert after["stages"]["lora"]["losses"][:5] == before["stages"]["lora"]["losses"]
    assert after["stages"]["lora"]["step"] == 6
    assert_same_weights(load_file(folder / "model" / "model.safetensors"), load_file(HERE / "final" / "conversion.safetensors"))


def test_a_training_resumes(copy):
    folder = copy("training")
    command(
        "train", "digits", "--method", "linear", "--layers", "1", "--dim", "8", "--heads", "2", "--batch", "16", "--steps", "12",
        "--threads", "1", "--out", "training", "--resume",
    )  # fmt: skip
    [record] = json.loads((folder / "results.json").read_text())["records"]
    [before] = json.loads((HERE / "training" / "results.json").read_text())["records"]
    assert (record["status"], record["step"]) == ("done", 12)
    assert record["losses"][:4] == before["losses"][:4]  # from the checkpoint, not trained again
    weights = load_file(folder / "linear" / "checkpoint-12" / "model.safetensors")
    assert_same_weights(weights, load_file(HERE / "final" / "training.safetensors"))


def test_a_comparison_loads():
    results = load(HERE / "comparison" / "results.json")
    assert (results.methods, results.lengths) == (["linear", "local"], [16, 32])
    assert any(timing.rounds for timing in results.timings if timing.method == "local")
