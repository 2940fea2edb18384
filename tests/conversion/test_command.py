"""`subquad convert`: a whole conversion from the command line."""

import json
import lzma
import shlex
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaModel,
)
from typer.testing import CliRunner

import subquad as sq
from subquad.cli import app, terminal
from subquad.cli.convert import parse_repair
from subquad.conversion import plan as plans
from subquad.conversion.plan import (
    STAGES,
    LoraOptions,
    LowRankOptions,
    Plan,
    Repair,
    Source,
    StageOptions,
    Swap,
    Text,
)
from subquad.conversion.pretrained import load_config, load_model, load_tokenizer
from subquad.conversion.repair import Schedule
from subquad.conversion.results import load
from subquad.conversion.run import run
from subquad.conversion.text import calibration
from tests.conversion.conftest import CONTEXT, saved

TEXT = {"length": 24, "batch": 4, "tokens": 2400}
SIZES = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 3}
METHOD = ["--method", "hybrid", "--option", "window=2"]


def invoke(*words):
    return CliRunner().invoke(app, ["convert", *map(str, words)])


def small(*stages):
    """A short repair of little text, on the command line."""
    options = [*(["steps=6"] if stages else []), *(["rank=2"] if {"align", "lora"} & {*stages} else [])]
    repair = ["--repair", ",".join(stages)] if stages else []
    text = [word for name, value in TEXT.items() for word in (f"--{name}", value)]
    return [*text, *repair, *(word for option in options for word in ("--repair-option", option))]


def plan(model, text, stages=(), keep=0, seed=0, **options):
    """The same as a plan; `options` are those of all stages that have them, or of one: lora={"steps": 1}."""
    repair = {}
    for stage in stages:
        own = {"steps": 6, **({} if stage == "transfer" else {"rank": 2})}
        own |= {name: value for name, value in options.items() if hasattr(STAGES[stage], name)}
        repair[stage] = STAGES[stage](**own | options.get(stage, {}))
    return Plan(
        source=Source(model=str(model)),
        swap=Swap(method=sq.Hybrid(window=2), keep=keep),
        text=Text(files=(text,), **TEXT),
        repair=Repair(**repair),
        seed=seed,
    )


def weights(out):
    return load_file(out / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(llama, text, tmp_path_factory):
    """A conversion with every part."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return run(plan(llama, text, STAGES, keep=1), out), out


def test_learning_rates_are_those_of_the_stages_or_given(whole, llama, text, tmp_path):
    results, _ = whole
    assert {name: stage.lr for name, stage in results.stages.items()} == {"transfer": 1e-2, "align": 1e-3, "lora": 1e-3}
    wide = run(plan(llama, text, ("lora",), rank=16, steps=1), tmp_path / "wide")
    assert wide.stages["lora"].lr == 5e-4
    rated = run(plan(llama, text, ("lora",), rank=16, steps=1, lr=0.25), tmp_path / "rated")
    assert rated.stages["lora"].lr == 0.25


def test_options_of_all_stages_and_of_one():
    found = parse_repair("transfer,align,lora", ["steps=9", "lora.steps=5", "rank=4", "align.lr=0.5", "loss=distil"])
    assert found == Repair(
        transfer=StageOptions(steps=9),
        align=LowRankOptions(steps=9, rank=4, lr=0.5),
        lora=LoraOptions(steps=5, rank=4, loss="distil"),
    )
    assert parse_repair("", []) == Repair()


def test_what_must_be_the_same_to_resume():
    asked = Plan(
        source=Source(model="here"),
        swap=Swap(method="linear", keep_softmax=(1,)),
        repair=Repair(align=LowRankOptions(rank=2, minutes=5), lora=LoraOptions(steps=7, lr=0.5, rank=4)),
        threads=3,
    )
    assert asked.identity(None) == {
        "model": "here", "gguf": None, "dtype": "float32", "layers": "all", "keep_softmax": [1], "cross": False,
        "beyond_context": False, "keep": 0, "length": None, "batch": None, "tokens": None, "text": None,
        "repair": ["align", "lora"], "transfer_steps": None, "align_steps": 300, "lora_steps": 7, "transfer_lr": None,
        "align_lr": None, "lora_lr": 0.5, "loss": None, "rank": {"align": 2, "lora": 4}, "targets": "attention",
        "precision": "fp32", "seed": 0,
    }  # fmt: skip


def test_the_precision_of_a_repair_is_that_of_its_stages(llama, text, whole, tmp_path):
    results = run(plan(llama, text, STAGES, keep=1, precision="bf16"), tmp_path / "out")
    plain, _ = whole
    assert results.settings["precision"] == "bf16"
    for stage, progress in results.stages.items():
        assert progress.losses != plain.stages[stage].losses
        assert progress.losses[0][1] == pytest.approx(plain.stages[stage].losses[0][1], rel=0.05)
    given = ["--text", text, "--repair", "transfer", "--repair-option", "precision=fp8"]
    refused = invoke(llama, *METHOD, *given, "--out", tmp_path / "other")
    assert "precision must be fp32 or bf16; got 'fp8'" in str(refused.exception)
    assert not (tmp_path / "other").exists()


def test_every_part_is_measured_and_written(whole, text):
    results, out = whole
    assert list(results.diagnoses) == ["naive swap", "keep", *STAGES]
    assert list(results.stages) == list(STAGES)
    assert all(stage.ended == "all steps are done" for stage in results.stages.values())
    assert results.last.loss_after < results.naive.loss_after
    assert len(results.kept.layers) == 1
    kinds = {int(site.split(".")[1]): found["name"] for site, found in results.conversion["sites"].items()}
    assert {layer for layer, name in kinds.items() if name == "softmax"} == set(results.kept.layers)
    assert results.calibration["files"] == [str(text)]
    assert results.settings["loss"] == "language"
    assert load(out / "results.json") == results
    assert sorted(path.name for path in out.iterdir()) == [".lock", "model", "repair", "results.json"]


def test_the_model_that_was_judged_is_the_one_that_was_saved(whole, llama, text):
    results, out = whole
    loaded = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    original = load_model(str(llama), load_config(str(llama)))
    given = calibration(loaded, tokenizer, [text], length=24, batch=4, tokens=2400)
    again = sq.diagnose(original, loaded, given.evaluation)
    assert again.loss_after == pytest.approx(results.last.loss_after, rel=1e-6)
    assert again.heads == results.last.heads


def test_what_measures_is_never_trained_on(llama, text):
    model = load_model(str(llama), load_config(str(llama)))
    found = calibration(model, load_tokenizer(str(llama)), [text], length=24, batch=4, tokens=2400)
    rows = {name: [tuple(row.tolist()) for batch in part for row in batch["input_ids"]] for name, part in vars(found).items()}
    assert len(rows["evaluation"]) == 10
    assert len(rows["training"]) == 90
    assert not set(rows["evaluation"]) & set(rows["training"])
    assert all(row[0] == 1 and 1 not in row[1:] and len(row) == 24 for row in rows["evaluation"] + rows["training"])
    stream = [number for row in rows["evaluation"] + rows["training"] for number in row[1:]]
    assert load_tokenizer(str(llama)).decode(stream).startswith("0 1 2 3 4 5 6\n0 2 4 6 8 10 12\n")


def test_an_encoder_reads_lines(bert, text):
    model = load_model(str(bert), load_config(str(bert)))
    found = calibration(model, load_tokenizer(str(bert)), [text], batch=4, tokens=2400)
    ids, mask = (found.evaluation[0][name] for name in ("input_ids", "attention_mask"))
    assert torch.equal(mask.bool(), ids != 0)
    assert (ids[:, 0] == 1).all()
    assert load_tokenizer(str(bert)).decode(ids[0], skip_special_tokens=True) == "0 1 2 3 4 5 6"


@pytest.mark.parametrize("name", ["llama", "bert", "bart", "t5"])
def test_softmax_loses_nothing_and_says_so(name, request, text, tmp_path):
    line = [
        request.getfixturevalue(name),
        "--method",
        "softmax",
        "--text",
        text,
        *small(),
        "--report",
        "--out",
        tmp_path / "out",
    ]
    done = invoke(*line)
    assert done.exit_code == 0, done.output
    assert "heads with the most damage" not in done.stdout
    results = load(tmp_path / "out" / "results.json")
    assert results.last.cosine == pytest.approx(1)
    assert "Heads by damage" not in (tmp_path / "out" / "report.html").read_text()


def test_a_folder_without_a_tokenizer_is_not_read_by_another(text, tmp_path):
    config = GPT2Config(vocab_size=259, n_embd=12, n_layer=2, n_head=3, n_positions=CONTEXT, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "bare")
    done = invoke(tmp_path / "bare", "--method", "linear", "--text", text, *small(), "--out", tmp_path / "out")
    assert "bare has no tokenizer: none of" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_model_that_needs_more_than_text(text, tmp_path):
    config = CLIPConfig(
        text_config={**SIZES, "vocab_size": 259, "max_position_embeddings": CONTEXT},
        vision_config={**SIZES, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    saved(CLIPModel(config), tmp_path / "clip")
    done = invoke(tmp_path / "clip", "--method", "softmax", "--text", text, *small(), "--out", tmp_path / "out")
    assert "CLIPModel does not run on calibration text alone" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cross", [[], ["--cross"]])
def test_an_encoder_decoder(bart, text, tmp_path, cross):
    out = tmp_path / "out"
    done = invoke(bart, "--method", "hedgehog", *cross, "--text", text, *small(*STAGES), "--keep", 1, "--out", out)
    assert done.exit_code == 0, done.output
    results = load(out / "results.json")
    kinds = {site: found["name"] for site, found in results.conversion["sites"].items()}
    [kept] = results.kept.layers
    for site, name in kinds.items():
        is_changed = f"layers.{kept}." not in site and (bool(cross) or "encoder_attn" not in site)
        assert name == ("hedgehog" if is_changed else "softmax"), site
    assert results.last.cosine > results.naive.cosine
    assert results.last.loss_after is None  # it is no causal language model
    model = AutoModelForSeq2SeqLM.from_pretrained(out / "model")
    ids = torch.randint(3, 259, (2, 9))
    greedy = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert torch.equal(greedy, model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=False))


def test_ctrl_c_anywhere_loses_nothing(whole, llama, text, tmp_path):
    results, finished = whole
    asked = plan(llama, text, STAGES, keep=1)
    seen = []
    parts = ("loading", "diagnosing, naive", "keep search", *(f"{stage}, step 3" for stage in STAGES), "diagnosing, lora")
    for part in parts:

        def interrupt(progress, part=part):
            seen.append(progress.message)
            if progress.message.startswith(part):
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            run(asked, tmp_path, resume=True, on_progress=interrupt)
        assert not (tmp_path / "model").exists()
    again = run(asked, tmp_path, resume=True, on_progress=lambda progress: seen.append(progress.message))
    assert again.diagnoses == results.diagnoses
    assert again.kept == results.kept
    assert {name: stage.losses for name, stage in again.stages.items()} == {n: s.losses for n, s in results.stages.items()}
    expected = weights(finished)
    assert all(torch.equal(value, expected[name]) for name, value in weights(tmp_path).items())
    steps = [what.split(",")[1] for what in seen if what.startswith("transfer, step")]
    assert steps == [f" step {i}" for i in range(1, 7)], "no step is made twice"


def test_an_unfinished_conversion_is_resumed_only_if_asked(llama, text, tmp_path):
    def interrupt(progress):
        if progress.message.startswith("transfer, step"):
            signal.raise_signal(signal.SIGINT)

    asked = plan(llama, text, ("transfer",))
    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path, on_progress=interrupt)
    with pytest.raises(sq.SubquadError, match=r"is not finished\. Resume it with --resume"):
        run(asked, tmp_path)
    with pytest.raises(sq.SubquadError, match=r"another conversion \(seed: 0 there, 1 here\)"):
        run(plan(llama, text, ("transfer",), seed=1), tmp_path, resume=True)
    assert run(plan(llama, text, seed=1), tmp_path, fresh=True).is_saved
    assert not (tmp_path / "repair" / "transfer.pt").exists()


def test_a_folder_of_something_else_is_left_alone(llama, text, tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(sq.SubquadError, match="does not belong to a conversion"):
        run(plan(llama, text), tmp_path, fresh=True)
    assert (tmp_path / "model").exists()
    (tmp_path / "model").rmdir()
    (tmp_path / "results.json").write_text('{"schema": "subquad.train", "version": 1}')
    with pytest.raises(sq.SubquadError, match=r"must have schema 'subquad\.convert'"):
        run(plan(llama, text), tmp_path)


def test_the_command_prints_the_table_and_writes_the_page(llama, text, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = tmp_path / "out"
    line = [llama, *METHOD, "--text", text, *small("transfer"), "--report", "--out", out]
    done = invoke(*line)
    assert done.exit_code == 0, done.exception
    assert "The swap takes its perplexity from" in done.stdout
    for row in ("original", "naive swap", "after transfer", "layer 2, head 1", f"Written: {out / 'model'}"):
        assert row in done.stdout
    assert "LlamaForCausalLM with hybrid in 3 of its 3 attention modules" in (out / "report.html").read_text()
    again = invoke(*line)
    assert again.stdout == done.stdout
    assert invoke(*line, "--json").exit_code == 0


def test_json_is_the_file(llama, text, tmp_path):
    done = invoke(llama, "--method", "linear", "--text", text, *small(), "--out", tmp_path, "--json")
    printed, written = json.loads(done.stdout), json.loads((tmp_path / "results.json").read_text())
    assert (written.pop("schema"), written.pop("version")) == ("subquad.convert", 1)
    assert printed == written
    assert {"model", "method", "options", "machine", "command", "conversion", "diagnoses", "stages", "kept"} <= set(printed)


def test_without_text_it_is_only_converted(bert, tmp_path):
    done = invoke(bert, "--method", "linear", "--layers", "every 2", "--keep-softmax", "2", "--out", tmp_path)
    assert done.exit_code == 0
    assert "BertModel with linear in 1 of its 3 attention modules. Nothing was measured" in done.stdout
    model = AutoModel.from_pretrained(tmp_path / "model")
    assert model.encoder.layer[0].attention.self.subquad.method == sq.Linear()
    assert load(tmp_path / "results.json").diagnoses == {}


def test_an_encoder_is_repaired_by_its_states(bert, text, tmp_path):
    given = ["--text", text, *small("lora"), "--dtype", "float64"]
    done = invoke(bert, "--method", "linear", *given, "--out", tmp_path)
    assert done.exit_code == 0, done.exception
    results = load(tmp_path / "results.json")
    assert results.settings["loss"] == "embedding"
    assert results.naive.loss_before is None
    assert "at a cosine of" in done.stdout
    assert results.stages["lora"].best[1] < results.stages["lora"].losses[0][1]


def test_ctrl_c_says_how_to_resume(llama, text, tmp_path, monkeypatch):
    show = terminal.Bar.show

    def interrupt(self, progress):
        show(self, progress)
        if progress.message.startswith("transfer, step 2"):
            signal.raise_signal(signal.SIGINT)

    line = [llama, *METHOD, "--text", text, *small("transfer"), "--out", tmp_path]
    monkeypatch.setattr(terminal.Bar, "show", interrupt)
    stopped = invoke(*line)
    assert stopped.exit_code == 130
    assert "the same command with --resume continues" in " ".join(stopped.stderr.split())
    monkeypatch.undo()
    assert invoke(*line, "--resume").exit_code == 0
    assert load(tmp_path / "results.json").stages["transfer"].step == 6


@pytest.fixture
def places(llama, text, tmp_path):
    """Names for what the lines below speak of."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    config = json.loads((llama / "config.json").read_text())
    for name, more in {
        "quantized": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "weightless": {},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **more}))
    shutil.copytree(llama, tmp_path / "holed")
    kept = {name: weight for name, weight in load_file(llama / "model.safetensors").items() if "layers.1." not in name}
    save_file(kept, tmp_path / "holed" / "model.safetensors", {"format": "pt"})
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "few.txt").write_text("not enough to learn from " * 8)
    (tmp_path / "damaged.txt.xz").write_bytes(b"nothing")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe" * 100)
    return {"LLAMA": str(llama), "TEXT": str(text), "HERE": str(tmp_path)}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("HERE/nowhere --method linear", "there is no folder HERE/nowhere"),
        ("HERE/empty --method linear", "does not hold a Hugging Face model: it has no config.json"),
        ("HERE/broken --method linear", "does not hold a Hugging Face model: Unrecognized model"),
        ("HERE/weightless --method linear", "cannot be loaded: "),
        ("HERE/quantized --method linear", "is quantized"),
        ("LLAMA --method linear --gguf a.gguf", "it has no a.gguf"),
        ("LLAMA --method lineer", "no method is called 'lineer'; did you mean 'linear'"),
        ("LLAMA --method hybrid --option widow=3", "has no option 'widow'; did you mean 'window'"),
        ("LLAMA --method nystrom", "these layers cannot use nystrom, and nothing was converted"),
        ("LLAMA --method linear --layers 7", "numbers of layers that the model has, 0 to 2; got 7"),
        ("LLAMA --method linear --layers some", "--layers must be all, every 2, or layer numbers such as 0,3,5; got 'some'"),
        ("LLAMA --method linear --keep-softmax 0,1,2", "no layer is left to convert"),
        ("LLAMA --method linear --dtype int8", "dtype must be one of float32"),
        ("LLAMA --method linear --report", "--report needs measurements on calibration text; got no --text"),
        ("LLAMA --method linear --repair lora", "need calibration text; got none"),
        ("LLAMA --method linear --keep 1", "need calibration text; got none"),
        ("LLAMA --method linear --text HERE/short.txt", "at least 4 sequences and 64 tokens; the text has 0"),
        ("LLAMA --method linear --text HERE/few.txt --length 24 --repair lora", "at least two batches of 8 sequences"),
        ("LLAMA --method linear --text HERE/none.txt", "there is no file HERE/none.txt"),
        ("LLAMA --method linear --resume --fresh", "--resume continues a conversion, and --fresh starts over; got both"),
        ("LLAMA --method linear --text HERE/damaged.txt.xz", "damaged.txt.xz cannot be read"),
        ("LLAMA --method linear --text HERE/bytes.txt", "calibration text must be UTF-8; got HERE/bytes.txt"),
        ("LLAMA --method linear --text HERE", "calibration text must be a file, plain, .xz or .gz; got the folder HERE"),
        ("HERE/holed --method linear", "the weights in HERE/holed do not fit LlamaForCausalLM"),
        ("LLAMA --method linear --text TEXT --repair lora --dtype float16", "float32, bfloat16 or float64; got float16"),
        ("LLAMA --method linear --seed 99999999999999999999", "seed must be an integer from 0 to 2^31 - 1; got 9999"),
        ("LLAMA --method linear --text TEXT --repair lora --repair-option lr=0", "lr must be a finite number above 0; got 0.0"),
        (
            "LLAMA --method linear --text TEXT --repair align --repair-option align.steps=0",
            "align: steps must be an integer of at least 1",
        ),
        (
            "LLAMA --method hybrid --text TEXT --repair transfer --repair-option transfer.lr=nan",
            "transfer: lr must be a finite number above 0; got nan",
        ),
        ("LLAMA --method linear --text TEXT --length 100", f"from 2 to the context of the model, {CONTEXT}; got 100"),
        ("LLAMA --method linear --text TEXT --repair lora,transfer", "each once, in that order; got lora, transfer"),
        ("LLAMA --method performer --text TEXT --repair transfer", "performer has none. Leave transfer out"),
        ("LLAMA --method softmax --text TEXT --repair transfer", "softmax has none. Leave transfer out"),
        ("LLAMA --method softmax --text TEXT --repair align", "not softmax, and all attention of this model is softmax"),
        (
            "LLAMA --method linear --text TEXT --repair align --repair-option rank=1000",
            "rank of a change must be at most 24, the full rank of the largest map",
        ),
        (
            "LLAMA --method linear --text TEXT --repair lora --repair-option loss=other",
            "must be one of language, distil, embedding; got 'other'",
        ),
        (
            "LLAMA --method linear --text TEXT --repair lora --repair-option lora.steps=0",
            "lora: steps must be an integer of at",
        ),
        (
            "LLAMA --method linear --text TEXT --repair lora --repair-option minutes=0",
            "minutes must be a number above 0; got 0.0",
        ),
        ("LLAMA --method linear --text TEXT --repair lora --repair-option rank=0", "lora: rank must be an integer of at"),
        (
            "LLAMA --method linear --text TEXT --repair lora --repair-option targets=heads",
            "lora: the targets of low-rank changes must be one of attention, all; got 'heads'",
        ),
        ("LLAMA --method linear --text TEXT --keep 3", "between 1 and 2 of the 3 converted layers"),
        ("LLAMA --method linear --text TEXT --batch 0", "batch must be an integer of at least 1"),
        (
            "LLAMA --method linear --tokens 500 --batch 2",
            "--batch, --tokens: these are options of calibration text; got no text",
        ),
        (
            "LLAMA --method linear --repair-option align.steps=5",
            "--repair-option align.steps is for align, and --repair has no such stage (none)",
        ),
        (
            "LLAMA --method linear --text TEXT --repair lora --repair-option align.steps=5",
            "--repair-option align.steps is for align, and --repair has no such stage (lora)",
        ),
        (
            "LLAMA --method hybrid --text TEXT --repair transfer --repair-option rank=4",
            "--repair-option rank is for align and lora, and --repair has no such stage (transfer)",
        ),
        (
            "LLAMA --method linear --text TEXT --repair align --repair-option loss=distil",
            "--repair-option loss is for lora, and --repair has no such stage (align)",
        ),
        (
            "LLAMA --method linear --text TEXT --repair-option minutes=5",
            "--repair-option minutes is for transfer and align and lora, and --repair has no such stage (none)",
        ),
        (
            "LLAMA --method linear --text TEXT --repair lora --repair-option stps=5",
            "the repair has no option 'stps'; did you mean 'steps' or 'loss'? Options: steps, lr, minutes, precision, rank, targets, loss",
        ),
        (
            "LLAMA --method hybrid --text TEXT --repair transfer --repair-option transfer.rank=5",
            "the stage transfer has no option 'rank'",
        ),
        (
            "LLAMA --method linear --text TEXT --repair lora --repair-option lara.rank=5",
            "there is no stage 'lara'; did you mean 'lora'?",
        ),
        (
            "LLAMA --method linear --text TEXT --repair lora --repair-option lora.steps=many",
            "--repair-option lora.steps must be an integer; got 'many'",
        ),
        (
            "LLAMA --method linear --text TEXT --repair lora --repair-option steps=1.5",
            "--repair-option steps must be an integer; got '1.5'",
        ),
        (
            "LLAMA --method linear --text TEXT --repair lora --repair-option lr=fast",
            "--repair-option lr must be a number; got 'fast'",
        ),
        (
            "LLAMA --method linear --text TEXT --repair lora --repair-option steps",
            "got 'steps'. Write it as --repair-option lora.steps=500",
        ),
        (
            "LLAMA --method linear --text TEXT --repair lora --repair-option steps=1 --repair-option steps=2",
            "got 'steps=2'. Write it as --repair-option lora.steps=500",
        ),
    ],
)
def test_refusals_write_nothing(line, said, places):
    def filled(words):
        for name, place in places.items():
            words = words.replace(name, place)
        return words

    out = Path(places["HERE"]) / "out"
    done = invoke(*filled(line).split(), "--out", out)
    assert isinstance(done.exception, sq.SubquadError), done.exception
    assert filled(said) in str(done.exception)
    assert not out.exists()


def test_what_cannot_be_converted(whole, llama, text, tmp_path):
    """What is converted, or has no attention, or no tokenizer."""
    _, out = whole
    done = invoke(out / "model", "--method", "linear", "--out", tmp_path / "out")
    assert "is converted already" in str(done.exception)
    MambaModel(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2)).save_pretrained(tmp_path / "mamba")
    done = invoke(tmp_path / "mamba", "--method", "linear", "--out", tmp_path / "out")
    assert "has no attention that goes through" in str(done.exception)
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path / "dumb")
    done = invoke(tmp_path / "dumb", "--method", "linear", "--text", text, "--out", tmp_path / "out")
    assert "no tokenizer can be loaded from" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_name_that_the_hub_does_not_give(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = invoke("nobody/no-such-model", "--method", "linear", "--out", tmp_path / "out")
    assert str(done.exception).startswith("there is no folder nobody/no-such-model, and as a name on the hub ")
    assert not (tmp_path / "out").exists()


def test_a_gguf_file(tmp_path):
    """Its weights are unpacked, whatever their precision was."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf, to read GGUF files")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    width, inner, words = 32, 64, 11
    for add, value in {
        "block_count": 2, "context_length": CONTEXT, "embedding_length": width, "feed_forward_length": inner, "head_count": 4,
        "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 8, "vocab_size": words,
    }.items():  # fmt: skip
        getattr(writer, f"add_{add}")(value)
    shapes = {"token_embd": (words, width), "output": (words, width), "output_norm": (width,)}
    for block in ("blk.0.", "blk.1."):
        shapes |= {block + name: (width, width) for name in ("attn_q", "attn_output")}
        shapes |= {block + name: (width // 2, width) for name in ("attn_k", "attn_v")}
        shapes |= {block + name: (inner, width) for name in ("ffn_gate", "ffn_up")}
        shapes |= {block + "ffn_down": (width, inner), block + "attn_norm": (width,), block + "ffn_norm": (width,)}
    for name, shape in shapes.items():
        weight = torch.randn(shape).numpy()
        packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0) if len(shape) == 2 else weight
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else None
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = invoke(tmp_path, "--gguf", "tiny.gguf", "--method", "linear", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.exception
    assert "LlamaForCausalLM with linear in 2 of its 2 attention modules" in done.stdout
    assert "no tokenizer" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_a_missing_extra_is_known_before_anything_is_done(llama, text, tmp_path, monkeypatch):
    line = [llama, "--method", "linear", "--text", text, *small(), "--out", tmp_path / "out"]
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "low-rank finetuning needs the extra subquad[convert]" in str(invoke(*line, "--repair", "lora").exception)
    monkeypatch.setitem(sys.modules, "altair", None)
    assert "the HTML report needs the extra subquad[report]" in str(invoke(*line, "--report").exception)
    assert not (tmp_path / "out").exists()


def test_the_examples_of_help_work(llama, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(plans, "Schedule", partial(Schedule, patience=1, every=2))
    Path("model").symlink_to(llama)
    Path("text.txt").write_bytes(lzma.decompress(text.read_bytes()))
    for example in (
        "convert ./model --method hybrid --text text.txt --repair transfer,lora --out new",
        'generate new/model "Once upon a time" --stream',
    ):
        name, *words = shlex.split(example)
        assert f"Example: subquad {example}" in CliRunner().invoke(app, [name, "--help"]).stdout
        done = CliRunner().invoke(app, [name, *words])
        assert done.exit_code == 0, done.exception
