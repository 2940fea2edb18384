"""A run from its first step to its table."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.loss.loss_utils import ForMaskedLMLoss

import subquad as sq
from subquad.models import seq2seq
from subquad.runs import checkpoints
from subquad.tasks.tokens import to_transformers, word_tokenizer
from subquad.training import load
from subquad.training.data import Batches
from subquad.training.plan import choose_methods
from tests.training.fake import SETTINGS, Fake, FakePairs, FakeText
from tests.training.weights import equal, last, stop_after, weights


def test_a_run_leaves_its_scores_its_curves_and_its_best_model(run, tmp_path):
    results = run("linear", "softmax", eval_every=5)
    assert [r.status for r in results.records] == ["done", "done"]
    for record in results.records:
        assert record.step == record.steps == 12
        assert [step for step, _ in record.losses] == list(range(1, 13))
        assert [e["step"] for e in record.evals] == [5, 10, 12]
        best = max(record.evals, key=lambda e: e["accuracy"])
        assert record.best["accuracy"] == best["accuracy"]
        assert record.best_step == best["step"]
        assert record.step_seconds > 0
        kept = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / record.method / "best")
        assert sum(p.numel() for p in kept.parameters()) == record.parameters
        splits = Fake().load(None, SETTINGS)
        assert Fake().score(kept.eval(), splits.test, splits, SETTINGS) == record.test
        assert Fake().score(kept.eval(), splits.valid, splits, SETTINGS)["accuracy"] == best["accuracy"]
    assert load(tmp_path / "run" / "results.json") == results


def test_a_registered_mechanism_is_trained_in_a_worker(run, third_party, tmp_path):
    [record] = run("unchecked_squares", settings=replace(SETTINGS, steps=2), in_worker=True).records
    assert (record.status, record.method) == ("done", "unchecked_squares")
    kept = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / record.method / "best")
    assert any(isinstance(m, sq.MechanismModule) and m.method == third_party.Unchecked() for m in kept.modules())


def test_the_best_model_is_that_of_its_step_and_no_later_one(run, tmp_path):
    scores = iter([0.2, 0.9, 0.5, 0.5])

    class Told(Fake):
        def score(self, *_):
            return {"accuracy": next(scores, 0.0), "loss": 1.0}

    run(eval_every=4, task=Told())
    with pytest.raises(KeyboardInterrupt):
        run(eval_every=4, out=tmp_path / "short", on_progress=stop_after(7))
    assert equal(weights(tmp_path / "run" / "linear" / "best"), last(tmp_path / "short" / "linear"))


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not(run, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run(settings=replace(SETTINGS, seed=seed), out=tmp_path / name)
    a, b, c = (last(tmp_path / name / "linear") for name in "abc")
    assert equal(a, b)
    assert not equal(a, c)


def test_evaluations_leave_the_training_alone(run, tmp_path):
    run(out=tmp_path / "often", eval_every=1)
    run(out=tmp_path / "once", eval_every=12)
    assert equal(last(tmp_path / "often" / "linear"), last(tmp_path / "once" / "linear"))


@pytest.mark.parametrize("given", [{"precision": "bf16"}, {"checkpointing": True}])
def test_thrifty_runs_are_recorded_and_end_near_the_plain_one(run, tmp_path, given):
    plain = run(out=tmp_path / "plain")
    thrifty = run(out=tmp_path / "thrifty", **given)
    assert thrifty.settings | {"precision": "fp32", "checkpointing": False} == plain.settings
    ((name, value),) = given.items()
    assert thrifty.settings[name] == value
    a, b = (r.records[0].losses for r in (plain, thrifty))
    assert [loss for _, loss in b] == pytest.approx([loss for _, loss in a], rel=0.02)
    assert (a == b) == (name == "checkpointing")


def test_the_loss_is_smoothed_and_shifted(run):
    """The first loss of a language model, before any update, by hand."""
    settings = replace(SETTINGS, steps=1, label_smoothing=0.3, dropout=0.0)
    record = run(task=FakeText(), settings=settings).records[0]
    task = FakeText()
    splits = task.load(None, settings)
    torch.manual_seed(settings.seed)
    model = task.model("linear", settings)
    places = next(iter(Batches(len(splits.train), settings.batch, 1, settings.seed)))
    batch = splits.collate([splits.train[row] for _, row in places])
    logits = model(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.3)
    assert record.losses[0][1] == pytest.approx(expected.item(), rel=1e-6)
    assert abs(record.losses[0][1] - model(**batch).loss.item()) > 1e-4


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_model_makes_a_loss_of_its_own_only_where_it_counts(run, tmp_path, monkeypatch, smoothing):
    made = []
    monkeypatch.setattr(seq2seq, "ForMaskedLMLoss", lambda *given: made.append(1) or ForMaskedLMLoss(*given))
    losses, calls = [], []
    for reads in ("given", "labels"):  # of the latter a model makes what its decoder reads
        made.clear()
        settings = replace(SETTINGS, label_smoothing=smoothing, options=(("reads", reads),))
        losses.append(run(task=FakePairs(), settings=settings, out=tmp_path / reads).records[0].losses)
        calls.append(len(made))
    assert calls == [0 if smoothing else SETTINGS.steps, SETTINGS.steps]
    assert losses[0] == losses[1]
    assert equal(*(last(tmp_path / reads / "linear") for reads in ("given", "labels")))


def test_the_rate_rises_to_its_height_and_falls_to_nothing(run, tmp_path):
    settings = replace(SETTINGS, warmup=0.5)
    with pytest.raises(KeyboardInterrupt):
        run(settings=settings, on_progress=stop_after(1))
    rates = [rate(tmp_path / "run")]
    run(settings=settings, resume=True)
    assert [*rates, rate(tmp_path / "run")] == pytest.approx([0.01 * 2 / 6, 0.0])


def rate(out):
    return torch.load(checkpoints.latest(out / "linear") / "scheduler.pt", weights_only=True)["_last_lr"][0]


def test_all_are_those_that_can_and_the_others_say_why(run):
    results = run("all", task=FakeText(), settings=replace(SETTINGS, steps=1))
    able = {r.method for r in results.records if r.status == "done"}
    assert {"linear", "softmax", "local"} <= able
    refused = {r.method: r.why for r in results.records if r.status == "refused"}
    assert set(sq.methods()) == able | set(refused)
    assert "causal" in refused["nystrom"]


def test_what_is_only_a_bound_is_trained_if_named():
    able, refused = choose_methods(Fake(), ["all"], SETTINGS)
    assert "only if named" in refused["svd"]
    assert {*able, *refused} == set(sq.methods())
    assert choose_methods(Fake(), ["svd"], SETTINGS)[0].keys() == {"svd"}


def test_the_peak_is_that_of_training_alone():
    """In a process of its own, as trainings are: another's garbage, freed meanwhile, would count against the peak."""
    lines = (
        "import torch; from subquad.runs.memory import PeakMemory; peak = PeakMemory(torch.device('cpu'))",
        "with peak.paused(): torch.ones(2**25)  # 128 MiB",
        "print(peak.bytes()); torch.ones(2**25); print(peak.bytes())",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    paused, counted = map(int, done.stdout.split())
    assert paused < 2**26 < counted


def test_methods_with_options_are_recorded_with_all_of_them(run):
    results = run(sq.Local(window=2), "performer", settings=replace(SETTINGS, steps=1))
    local, performer = results.records
    assert local.options == {"window": 2, "dilation": 1}
    assert performer.options["features"]


def test_finished_methods_are_kept_and_others_join_them(run, tmp_path):
    first = run("linear")
    both = run("linear", "softmax")
    assert both.records[0] == first.records[0]
    assert [r.status for r in both.records] == ["done", "done"]


def test_epochs_are_passes_over_the_rows(run):
    results = run(settings=replace(SETTINGS, steps=None, epochs=1.5))
    assert results.records[0].steps == 6  # 1.5 x 30 rows / 8


def test_a_run_is_watched(run):
    seen = []
    run("linear", "softmax", on_progress=lambda p: seen.append((p.record.method, p.record.status, p.fraction)))
    shares = [share for *_, share in seen]
    assert shares == sorted(shares)
    assert seen[-1] == ("softmax", "done", 1.0)
    assert ("linear", "running") in {entry[:2] for entry in seen}


def test_the_file_is_whole_after_every_change(run, tmp_path):
    seen = []

    def on_progress(progress):
        seen.append(json.loads((tmp_path / "run" / "results.json").read_text())["records"][0]["status"])

    run(on_progress=on_progress)
    assert seen[-1] == "done"
    assert "running" in seen
    assert not list((tmp_path / "run").glob(".results*"))


def test_only_the_newest_checkpoint_is_kept(run, tmp_path):
    run(save_every=2)
    found = sorted(path.name for path in (tmp_path / "run" / "linear").glob("checkpoint-*"))
    assert found == ["checkpoint-12"]
    assert checkpoints.step_of(checkpoints.latest(tmp_path / "run" / "linear")) == 12


@pytest.mark.parametrize("length", [7, 40])
@pytest.mark.parametrize("task", [Fake, FakeText])
def test_every_parameter_of_every_method_has_a_gradient(task, length):
    """Processes that share a run wait for all of them."""
    settings, task = replace(SETTINGS, length=length), task()
    splits, (able, _) = task.load(None, settings), choose_methods(task, ["all"], settings)
    for config in able.values():
        model = task.model(config, settings)
        model(**splits.collate([splits.train[i] for i in range(8)])).loss.backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == [], config


def test_what_writes_text_for_a_model_is_kept_beside_it(run, tmp_path):
    class Writing(Fake):
        def text_tokenizer(self):
            return to_transformers(word_tokenizer(["no", "yes"], "no"), unk_token="no")

    run(task=Writing())
    loaded = AutoTokenizer.from_pretrained(tmp_path / "run" / "linear" / "best")
    assert loaded("yes maybe yes")["input_ids"] == [1, 0, 1]
