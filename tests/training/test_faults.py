"""Whatever ends a run: the last checkpoint is intact, the message says what to do, and a resumed run gives the same bits."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator

import subquad as sq
from subquad.runs import checkpoints
from subquad.runs.stop import StopRequest
from subquad.training import load, train
from tests.training.fake import SETTINGS, Fake, FakeText
from tests.training.weights import equal, last, stop_after, weights


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_makes_a_checkpoint_and_going_on_gives_the_same_bits(run, tmp_path, number):
    whole = run(out=tmp_path / "whole", eval_every=5, save_every=100)
    with pytest.raises(KeyboardInterrupt):
        run(eval_every=5, save_every=100, on_progress=stop_after(6, number))
    stopped = load(tmp_path / "run" / "results.json").records[0]
    assert (stopped.status, stopped.step) == ("stopped", 7)
    assert checkpoints.latest(tmp_path / "run" / "linear").name == "checkpoint-7"
    with pytest.raises(sq.SubquadError, match=r"not finished: linear\. Continue it with --resume, or start over with --fresh"):
        run(eval_every=5)
    again = run(eval_every=5, save_every=100, resume=True)
    assert equal(last(tmp_path / "run" / "linear"), last(tmp_path / "whole" / "linear"))
    assert equal(weights(tmp_path / "run" / "linear" / "best"), weights(tmp_path / "whole" / "linear" / "best"))
    for name in ("losses", "evals", "best_step", "test", "status", "step"):
        assert getattr(again.records[0], name) == getattr(whole.records[0], name), name


def test_the_handlers_of_signals_are_put_back(run):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run(settings=replace(SETTINGS, steps=1))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_stop_between_methods_leaves_the_others_waiting(run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run("linear", "softmax", on_progress=stop_after(12))
    assert [r.status for r in load(tmp_path / "run" / "results.json").records] == ["done", "waiting"]
    assert [r.status for r in run("linear", "softmax").records] == ["done", "done"]


def test_starting_over_removes_the_run_and_nothing_else(run, tmp_path):
    run("linear", "softmax")
    (tmp_path / "run" / "mine.txt").write_text("mine")
    results = run("linear", settings=replace(SETTINGS, lr=0.02), fresh=True)
    assert [r.method for r in results.records] == ["linear"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "results.json", "linear", "mine.txt"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"settings": replace(SETTINGS, lr=0.02, seed=4)}, r"lr: 0\.01 there, 0\.02 here; seed: 3 there, 4 here"),
        ({"settings": replace(SETTINGS, options=(("kind", "b"),))}, r"options: \{\} there, \{'kind': 'b'\} here"),
        ({"precision": "bf16"}, "precision: 'fp32' there, 'bf16' here"),
        ({"checkpointing": True, "resume": True}, "checkpointing: False there, True here"),
    ],
)
def test_a_folder_of_other_settings_is_refused_with_the_differences(run, given, said):
    run()
    with pytest.raises(sq.SubquadError, match=rf"other settings \({said}\)\. Choose another --out, or start over with --fresh"):
        run(**given)


def test_a_method_with_other_options_is_refused(run):
    run(sq.Local(window=2))
    with pytest.raises(sq.SubquadError, match="local, window: 2 there, 3 here"):
        run(sq.Local(window=3))


def test_a_run_with_other_rows_in_its_batches_is_not_gone_on_with(run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(on_progress=stop_after(6))
    checkpoint = checkpoints.latest(tmp_path / "run" / "linear")
    saved = json.loads((checkpoint / "run.json").read_text())
    (checkpoint / "run.json").write_text(json.dumps({**saved, "order": 3}))
    checkpoints.write_checksums(checkpoint)
    with pytest.raises(sq.SubquadError, match=r"\(linear, order of rows: 3 there, 2 here\)\. Choose another --out, or"):
        run(resume=True)
    assert [r.status for r in run(fresh=True).records] == ["done"]


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "model.safetensors", "run.json", "contents.json"])
@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_a_checkpoint_that_is_not_as_it_was_written_is_not_gone_on_from(run, tmp_path, name, damage):
    with pytest.raises(KeyboardInterrupt):
        run(on_progress=stop_after(6))
    folder = tmp_path / "run" / "linear"
    path = checkpoints.latest(folder) / name
    content = path.read_bytes()
    path.write_bytes(content[:-3]) if damage == "cut" else path.unlink()
    with pytest.raises(sq.SubquadError, match=rf"missing or have changed: {name}\. Put them back, or remove .*linear to start"):
        run(resume=True)
    path.write_bytes(content)
    assert run(resume=True).records[0].status == "done"


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_without_its_best_model_a_run_is_not_gone_on_with(run, tmp_path, damage):
    """It would be missed at the end, when the test rows are scored with it."""
    with pytest.raises(KeyboardInterrupt):
        run(eval_every=5, on_progress=stop_after(6))
    best = tmp_path / "run" / "linear" / "best"
    kept = shutil.copytree(best, tmp_path / "kept")
    shutil.rmtree(best) if damage == "removed" else (best / "model.safetensors").write_bytes(b"half")
    named = {"removed": r"contents\.json", "cut": r"model\.safetensors"}[damage]
    with pytest.raises(sq.SubquadError, match=rf"best these are missing or have changed: {named}\. Put them back, or remove"):
        run(eval_every=5, resume=True)
    shutil.copytree(kept, best, dirs_exist_ok=True)
    assert run(eval_every=5, resume=True).records[0].status == "done"


class OtherRows(Fake):
    """The same rows, but for one part of them in another order."""

    def __init__(self, part):
        self.part = part

    def load(self, folder, settings):
        splits = super().load(folder, settings)
        rows = getattr(splits, self.part)
        return replace(splits, **{self.part: rows.take(torch.arange(len(rows)).flip(0))})


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_table_is_of_one_set_of_rows(run, monkeypatch, part):
    with pytest.raises(KeyboardInterrupt):
        run("linear", on_progress=stop_after(6))
    other = OtherRows(part)
    monkeypatch.setattr("subquad.training.session.class_path", lambda task: "tests.training.fake:Fake")
    for methods in (["linear"], ["softmax"]):
        with pytest.raises(
            sq.InputError, match="all methods of a run must use the same rows; those of this machine have changed"
        ):
            run(*methods, task=other, resume=True)
    assert run("linear", resume=True).records[0].status == "done"


def test_smoothing_is_for_classes(run, tmp_path):
    class Numbers(Fake):
        def load(self, folder, settings):
            splits = super().load(folder, settings)
            splits.valid.columns["labels"] = splits.valid.columns["labels"].float()
            return splits

    with pytest.raises(
        sq.InputError, match=r"label_smoothing must be 0 for a regression task, whose labels are not classes; got 0\.1"
    ):
        run(task=Numbers(), settings=replace(SETTINGS, label_smoothing=0.1))


def test_a_score_that_is_not_finite_is_a_divergence(run):
    class Lost(Fake):
        def score(self, model, rows, splits, settings):
            return {**super().score(model, rows, splits, settings), "loss": float("inf")}

    record = run(task=Lost(), eval_every=5).records[0]
    assert record.status == "diverged"
    assert "on validation rows the loss is inf at step 5, with a learning rate of" in record.why


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": "bogus"}, r"records\[0\]\.status must be one of 'waiting', .*; got 'bogus'"),
        ({"step": 8}, "linear must have made 12 steps to be done; got 8"),
        ({"test": {"accuracy": "high"}}, r"records\[0\]\.test\['accuracy'\] must be a number; got 'high'"),
    ],
)
def test_results_that_make_no_sense_are_refused(run, tmp_path, change, said):
    run()
    path = tmp_path / "run" / "results.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "records": [{**saved["records"][0], **change}]}))
    with pytest.raises(sq.SubquadError, match=said):
        run("linear", "softmax")
    path.write_text(json.dumps({**saved, "task": {}}))
    with pytest.raises(sq.SubquadError, match=r"task\.name is missing"):
        run("linear", "softmax")


def test_a_file_where_a_method_would_have_its_folder_is_refused(run, tmp_path):
    run()
    (tmp_path / "run" / "softmax").write_text("mine")
    with pytest.raises(sq.SubquadError, match=r"a folder named after it; .*softmax is a file\. Move it away"):
        run("linear", "softmax")


def test_arguments_of_another_kind_are_refused(tmp_path):
    class Mine(Fake):
        pass

    for task, methods, said in (
        ("digits", ["linear"], r"task must be a Task, such as subquad\.tasks\.TASKS\['digits'\]\(\); got 'digits'"),
        (Fake(), "linear", r"got 'linear'\. Pass \['linear'\]"),
        (Mine(), ["linear"], "Move it to a module, or pass in_worker=False"),
    ):
        with pytest.raises(sq.InputError, match=said):
            train(task, methods, out=tmp_path / "run")
    results = train(Mine(), ["linear"], out=str(tmp_path / "run"), threads=1, in_worker=False)
    assert results.records[0].status == "done"


def test_a_method_whose_folder_is_removed_starts_over(run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(on_progress=stop_after(6))
    shutil.rmtree(tmp_path / "run" / "linear")
    run(resume=True)
    run(out=tmp_path / "whole")
    assert equal(last(tmp_path / "run" / "linear"), last(tmp_path / "whole" / "linear"))


def test_results_that_are_not_whole_are_refused(run, tmp_path):
    run()
    path = tmp_path / "run" / "results.json"
    text = path.read_text()
    for content, said in ((text[:50], "not valid JSON"), ("{}", "must have schema 'subquad.train'")):
        path.write_text(content)
        with pytest.raises(sq.SubquadError, match=said):
            run()
    saved = json.loads(text)
    del saved["records"]
    path.write_text(json.dumps(saved))
    with pytest.raises(sq.SubquadError, match="is not a valid results file of this version"):
        run()


def test_checkpoints_without_results_are_not_gone_on_from(run, tmp_path):
    run(out=tmp_path / "whole", settings=replace(SETTINGS, lr=0.02))
    run()
    path = tmp_path / "run" / "results.json"
    path.write_text("{")
    run(settings=replace(SETTINGS, lr=0.02), fresh=True)
    assert equal(last(tmp_path / "run" / "linear"), last(tmp_path / "whole" / "linear"))
    path.unlink()
    for given in ({}, {"resume": True}):
        with pytest.raises(sq.SubquadError, match=r"has models of linear, of which results\.json has no record"):
            run(settings=replace(SETTINGS, steps=3), **given)
    assert (tmp_path / "run" / "linear" / "best").exists()
    assert run(settings=replace(SETTINGS, steps=3), fresh=True).records[0].step == 3


def test_starting_over_leaves_the_file_of_another_program_alone(run, tmp_path):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "results.json"
    for content in ('{"mine": 1}', "[1, 2]"):
        path.write_text(content)
        with pytest.raises(sq.SubquadError, match=r"written by another program: choose another folder\.$"):
            run(resume=True)
        with pytest.raises(sq.SubquadError, match=r"is something else\. Choose another --out"):
            run(fresh=True)
        assert path.read_text() == content


def test_going_on_and_starting_over_contradict_each_other(run, tmp_path):
    with pytest.raises(sq.InputError, match="got --resume and --fresh"):
        run(resume=True, fresh=True)


def test_two_runs_do_not_share_a_folder(run):
    def on_progress(progress):
        with pytest.raises(sq.SubquadError, match="another training is writing to"):
            run()

    run(settings=replace(SETTINGS, steps=1), on_progress=on_progress)


def test_a_loss_that_is_no_number_stops_the_method_and_keeps_the_last_good_checkpoint(run, tmp_path):
    class Poisoned(Fake):
        def model(self, method, settings):
            model, steps = super().model(method, settings), iter(range(100))
            model.classifier.register_forward_hook(
                lambda module, _, logits: logits * float("nan") if module.training and next(steps) == 7 else logits
            )
            return model

    results = run("linear", task=Poisoned(), save_every=3)
    record = results.records[0]
    assert record.status == "diverged"
    assert re.search(r"the loss is nan at step 8, with a learning rate of 0\.00\d+", record.why)
    assert "lower --lr than 0.01" in record.why
    newest = checkpoints.latest(tmp_path / "run" / "linear")
    assert f"the last good checkpoint, {newest}, is kept" in record.why
    assert all(x.isfinite().all() for x in weights(newest).values())


def test_a_loss_that_explodes_is_a_divergence(run):
    settings = replace(SETTINGS, lr=300.0, steps=60, warmup=0.0)
    record = run("linear", "softmax", settings=settings).records[0]
    assert record.status == "diverged"
    assert re.search(r"above 3 times its first value, 0\.\d+, for 20 steps at step \d+, with a learning rate of", record.why)


def test_a_diverged_method_is_not_trained_again_and_costs_the_others_nothing(run):
    settings = replace(SETTINGS, lr=300.0, steps=60, warmup=0.0)
    first = run("linear", settings=settings)
    assert run("linear", settings=settings, resume=True).records == first.records


def test_a_gradient_that_is_not_finite_is_seen_before_it_reaches_the_weights(run, tmp_path, monkeypatch):
    clip, calls = Accelerator.clip_grad_norm_, iter(range(100))
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", lambda *a: clip(*a) if next(calls) < 5 else torch.tensor(float("inf")))
    record = run(save_every=1).records[0]
    assert record.status == "diverged"
    assert "but its gradient is not finite at step 6" in record.why
    assert checkpoints.latest(tmp_path / "run" / "linear").name == "checkpoint-5"


def _full_after(count, monkeypatch, part):
    """The disk has room for so many writings of a part of a checkpoint."""
    real, calls = getattr(torch, part), iter(range(10**6))

    def save(*args, **given):
        if next(calls) >= count:
            raise OSError(28, "No space left on device")
        return real(*args, **given)

    monkeypatch.setattr(torch, part, save)


def test_a_full_disk_keeps_the_last_checkpoint_and_says_so(run, tmp_path, monkeypatch):
    run(out=tmp_path / "whole", save_every=2)
    with monkeypatch.context() as patch:
        _full_after(8, patch, "save")  # three a checkpoint
        with pytest.raises(checkpoints.SaveError, match=r"No space left on device \([\d,]+ MiB are free there\)") as error:
            run(save_every=2)
    assert "the checkpoint of step 4 is intact. Make room, then run the same command with --resume" in str(error.value)
    folder = tmp_path / "run" / "linear"
    assert checkpoints.latest(folder).name == "checkpoint-4"
    assert not any((folder / checkpoints.STAGING).iterdir())
    assert load(tmp_path / "run" / "results.json").records[0].status == "failed"
    run(save_every=2, resume=True)
    assert equal(last(folder), last(tmp_path / "whole" / "linear"))


def test_a_disk_that_is_full_for_real(run, tmp_path, monkeypatch):
    """A limit on the size of files, in a process of its own; what writes tensors has its own kind of error for that."""
    monkeypatch.setenv("ROOM", str(tmp_path / "room"))
    settings = replace(SETTINGS, options=(("fault", "full"),))
    with pytest.raises(
        sq.SubquadError, match=r"could not be written: .*[Ff]ile too large.*Nothing else was lost: there is no checkpoint"
    ):
        run(settings=settings, in_worker=True)
    (tmp_path / "room").touch()
    assert run(settings=settings, resume=True).records[0].status == "done"


def test_a_kill_between_two_names_loses_no_best_model(run, tmp_path):
    run()
    folder = tmp_path / "run" / "linear"
    before = weights(folder / "best")
    os.rename(folder / "best", folder / ".old")
    (folder / checkpoints.STAGING / "checkpoint-13").mkdir(parents=True, exist_ok=True)
    checkpoints.clean_up(folder)
    assert equal(weights(folder / "best"), before)
    assert not (folder / checkpoints.STAGING).exists()


def test_a_crash_costs_one_method(run, tmp_path):
    settings = replace(SETTINGS, options=(("fault", "exit"),))
    results = run("linear", "softmax", settings=settings, in_worker=True)
    crashed, other = results.records
    assert crashed.status == "failed"
    assert "the process ended with code 7: no way on" in crashed.why
    assert other.status == "done"
    assert load(tmp_path / "run" / "results.json") == results


def test_an_error_costs_one_method(run):
    results = run("linear", "softmax", settings=replace(SETTINGS, options=(("fault", "error"),)))
    assert results.records[0].status == "failed"
    assert results.records[0].why == "ZeroDivisionError: a bug in a mechanism"
    assert results.records[1].status == "done"


def test_missing_data_concerns_all_methods_and_leaves_the_folder_free(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_DATA", "here")
    settings = replace(SETTINGS, options=(("fault", "data"),))
    with pytest.raises(sq.SubquadError, match="there is no data in here"):
        run("linear", "softmax", settings=settings)
    assert [r.status for r in load(tmp_path / "run" / "results.json").records] == ["waiting", "waiting"]
    assert [r.method for r in run("taylor").records] == ["taylor"]


def test_more_validation_rows_than_there_are_concern_all_methods(run):
    with pytest.raises(sq.InputError, match="eval_rows must be at most 15, the number of validation rows; got 16"):
        run(eval_rows=16)
    assert run(eval_rows=15).records[0].eval_rows == 15


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 1.0}, "pass either steps or epochs, .*; got steps=12 and epochs=1.0"),
        ({"steps": None}, "got steps=None and epochs=None"),
        ({"steps": 0}, "steps"),
        ({"steps": 10**9 + 1}, "steps must be at most 1,000,000,000; got 1,000,000,001"),
        ({"steps": None, "epochs": 1e300}, "epochs must be at most 1,000,000"),
        ({"lr": 0.0}, "lr must be a finite number above 0"),
        ({"lr": float("nan")}, "lr must be a finite number above 0"),
        ({"heads": 5}, "dim must be a multiple of heads; got dim=12 and heads=5"),
        ({"dropout": 1.0}, "dropout must be a fraction"),
        ({"warmup": -0.1}, "warmup must be a fraction"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"options": (("kind", "z"),)}, "kind of fake must be one of 'a', 'b'; got 'z'"),
        ({"options": (("kin", "a"),)}, "has no option 'kin'; did you mean 'kind'"),
    ],
)
def test_settings_that_no_run_can_have_are_refused(run, tmp_path, change, said):
    with pytest.raises(sq.SubquadError, match=said):
        run(settings=replace(SETTINGS, **change))
    assert not (tmp_path / "run").exists()


def test_methods_that_cannot_be_trained_are_refused(run):
    with pytest.raises(sq.UnknownMethodError, match="did you mean 'linear'"):
        run("linaer")
    with pytest.raises(sq.UnsupportedError, match="nystrom does not support this"):
        run("nystrom", task=FakeText())
    with pytest.raises(sq.InputError, match="at least one method"):
        train(Fake(), [])
    with pytest.raises(sq.InputError, match="a run trains each method once; got 'local' twice"):
        run("local", sq.Local(window=2))
    with pytest.raises(sq.InputError, match="all means every method that can do the task; got other methods as well"):
        run("linear", "all")
    with pytest.raises(sq.InputError, match="threads must be at most 1,024; got 100,000"):
        run(threads=100_000)
    for folder, said in (
        ("", "got an empty name"),
        ("here", "fake needs no data folder; got --data here"),
    ):
        with pytest.raises(sq.InputError, match=said):
            run(data=folder)
    with pytest.raises(sq.InputError, match="precision must be fp32 or bf16; got 'fp8'"):
        run(precision="fp8")
    with pytest.raises(sq.InputError, match="seed must be an integer from 0"):
        run(settings=replace(SETTINGS, seed=2**40))


def test_a_batch_is_shared_evenly(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(sq.InputError, match=r"multiple of their number; got 8 and 3 processes\. Pass --batch 9"):
        run()


def test_what_a_model_refuses_stands_in_the_table(run):
    class Picky(Fake):
        def model(self, method, settings):
            raise sq.UnsupportedError("linear cannot do this: pads")

    record = run(task=Picky()).records[0]
    assert (record.status, record.why) == ("refused", "linear cannot do this: pads")


def test_a_process_that_has_lost_the_others_lives_to_say_so():
    """Its launcher sends SIGTERM at any moment, also after the run."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with StopRequest() as stop:
            stop.keep_handlers()
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]  # or the next line would end the tests
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
