"""`subquad generate`: text from converted, trained and ordinary models."""

import signal
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import subquad as sq
from subquad.cli import app
from subquad.conversion.generation import Streamer, TextGenerator, state_bytes
from subquad.tasks import TASKS
from tests.conversion.conftest import CONTEXT, saved

PROMPT = "0 1 2 3"


def invoke(*words, **more):
    return CliRunner().invoke(app, ["generate", *map(str, words)], **more)


@pytest.fixture(scope="module")
def converted(llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("converted")
    sq.convert(AutoModelForCausalLM.from_pretrained(llama), "linear").save_pretrained(path)
    AutoTokenizer.from_pretrained(llama).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """As `subquad train pycode` leaves it."""
    path = tmp_path_factory.mktemp("trained")
    task = TASKS["pycode"]()
    settings = task.info.defaults
    task.model("linear", type(settings)(**{**vars(settings), "layers": 1, "dim": 16, "heads": 2})).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", ["llama", "converted"])
def test_it_is_what_generate_gives(kind, request):
    folder = request.getfixturevalue(kind)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    found = model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
    done = invoke(folder, PROMPT, "--max-new-tokens", 9)
    assert done.exit_code == 0, done.exception
    assert done.stdout == tokenizer.decode(found, skip_special_tokens=True) + "\n"
    assert f"{len(found)} tokens, " in done.stderr
    assert "per second, a cache of" in done.stderr
    assert invoke(folder, PROMPT, "--max-new-tokens", 9, "--stream").stdout == done.stdout
    for end in ("", "\n"):
        assert invoke(folder, "-", "--max-new-tokens", 9, input=PROMPT + end).stdout == done.stdout


def test_the_start_of_an_answer_is_not_counted(t5):
    generated = TextGenerator.load(str(t5)).generate(PROMPT, max_new_tokens=5)
    assert 1 <= generated.tokens <= 5


@pytest.mark.parametrize("method", ["linear", "softmax"])
def test_a_model_of_recall_writes_no_text(method, tmp_path):
    task = TASKS["recall"]()
    task.model(method, replace(task.info.defaults, layers=1, dim=16, heads=2)).save_pretrained(tmp_path)
    with pytest.raises(sq.InputError, match="SubquadForRecall has no head that generates text"):
        TextGenerator.load(str(tmp_path))


def test_text_comes_as_it_is_written(llama):
    generator, pieces = TextGenerator.load(str(llama)), []
    generated = generator.generate(PROMPT, max_new_tokens=30, temperature=1.0, on_text=pieces.append)
    assert "".join(pieces) == generated.text
    assert len(pieces) > 10
    euros = torch.tensor([[7], *([number] for number in generator.tokenizer("x€ y€", add_special_tokens=False)["input_ids"])])
    pieces.clear()
    streamer = Streamer(generator.tokenizer, pieces.append, has_prompt=True)
    for ids in euros:
        streamer.put(ids)
    streamer.end()
    assert pieces == ["x", "€", " ", "y", "€"], "a character comes when all of its bytes are there"


def test_sampling_follows_the_seed(converted):
    generator = TextGenerator.load(str(converted))
    texts = [generator.generate(PROMPT, temperature=2.0, top_p=0.9, max_new_tokens=12, seed=seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_state_of_a_converted_model_does_not_grow(converted, llama):
    held = {
        name: [TextGenerator.load(str(folder)).generate(PROMPT, max_new_tokens=count).state_bytes for count in (5, 30)]
        for name, folder in {"converted": converted, "ordinary": llama}.items()
    }
    assert held["converted"][0] == held["converted"][1]
    assert held["ordinary"][0] < held["ordinary"][1]
    assert state_bytes(None) is None


def test_bytes(trained, tmp_path):
    done = invoke(trained, "import os\n", "--max-new-tokens", 5)
    assert done.exit_code == 0, done.exception
    assert "5 tokens" in done.stderr
    model = AutoModelForCausalLM.from_pretrained(trained)
    ids = torch.tensor([list(b"import os\n")])
    assert TextGenerator.load(str(trained)).generate("import os\n", max_new_tokens=5).text == bytes(
        model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :].tolist()
    ).decode(errors="replace")
    model.config.tokenizer_class = None
    model.save_pretrained(tmp_path)
    said = str(invoke(tmp_path, "import").exception)
    assert f"no tokenizer can be loaded from {tmp_path}: " in said
    assert said.endswith("If the model's tokens are bytes, pass --bytes.")
    assert invoke(tmp_path, "import os\n", "--bytes", "--max-new-tokens", 5).stdout == done.stdout


def test_tokens_that_are_no_bytes(llama):
    assert "a model of bytes has at most 256 tokens; got a model of 259" in str(invoke(llama, "0 1", "--bytes").exception)


@pytest.mark.parametrize("kind", ["llama", "converted"])
def test_the_context_ends_the_text_unless_more_is_allowed(kind, request):
    folder = request.getfixturevalue(kind)
    done = invoke(folder, PROMPT, "--max-new-tokens", 60)
    written = int(done.stderr.split()[0])
    assert written < CONTEXT
    assert ("the context is full" in done.stderr) == (written == CONTEXT - len(PROMPT) - 1)
    long = "x" * (CONTEXT + 3)
    assert f"context of this model, {CONTEXT} tokens; got a prompt of {CONTEXT + 4}" in str(invoke(folder, long).exception)
    assert invoke(folder, long, "--beyond-context", "--max-new-tokens", 4).exit_code == 0


def test_positions_that_end(tmp_path):
    folder = saved(GPT2LMHeadModel(GPT2Config(n_embd=24, n_layer=1, n_head=3, n_positions=CONTEXT, vocab_size=259)), tmp_path)
    done = invoke(folder, "x" * (CONTEXT + 3), "--beyond-context")
    assert f"no positions beyond its context of {CONTEXT} tokens" in str(done.exception)


def test_ctrl_c_ends_the_text(converted, monkeypatch):
    generator = TextGenerator.load(str(converted))
    asked = []
    assert generator.generate(PROMPT, max_new_tokens=30, is_stopping=lambda: asked.append(0) or len(asked) == 3).tokens == 3

    def interrupted(self, *args, **more):
        signal.raise_signal(signal.SIGINT)
        return generate(self, *args, **more)

    generate = TextGenerator.generate
    monkeypatch.setattr(TextGenerator, "generate", interrupted)
    stopped = invoke(converted, PROMPT, "--max-new-tokens", 30)
    assert stopped.exit_code == 130
    assert stopped.stderr.startswith("1 token, ")


def test_refusals(bert, llama, tmp_path):
    assert "there is no folder" in str(invoke(tmp_path / "none", "a").exception)
    assert "BertModel has no head that generates text" in str(invoke(bert, "a").exception)
    assert "seed must be an integer from 0" in str(invoke(llama, "a", "--seed", "-1").exception)
    assert "above 0 and at most 1" in str(invoke(llama, "a", "--top-p", "1.5").exception)
    assert "temperature must be above 0" in str(invoke(llama, "a", "--temperature", "0").exception)
    assert invoke(llama, "a", "--max-new-tokens", "0").exit_code == 2
