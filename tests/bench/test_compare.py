"""A comparison: measured, stopped, killed, resumed, and what it refuses."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad.bench import Plan, ResultsError, Setting, advise, compare, load
from subquad.bench.compare import FILE
from subquad.bench.measure import DisagreementError, call, error, inputs, peak_bytes, require_agreement
from subquad.bench.worker import MeasuringWorker, WorkerError
from subquad.report import write_page
from subquad.runs.lock import exclusive

SETTING = Setting(heads=2, head_dim=16, threads=1)
PLAN = Plan(("linear", "local", "nystrom"), (64, 128), budget=60.0, rounds=2)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    seen = []
    return compare(PLAN, SETTING, folder, on_progress=seen.append), folder, seen


def test_every_cell_is_there(done):
    results, folder, seen = done
    assert results == load(folder / FILE)
    assert results.finished
    for method in ("sdpa", *PLAN.methods):
        for length in PLAN.lengths:
            assert results.fact(method, length).peak_bytes > 0
            for kind in PLAN.passes:
                timing = results.timing(method, length, kind)
                if method == "nystrom" and kind == "decode":
                    assert timing.status == "refused"
                    assert "landmarks" in timing.why
                    continue
                assert timing.status == "measured"
                assert len(timing.rounds) == 2
                assert all(own > 0 and base > 0 for own, base in timing.rounds)
    assert results.fact("linear", 64).errors["random"] > 0
    assert 0 <= seen[0].fraction <= seen[-1].fraction <= 1
    assert any("linear, 128 tokens" in progress.message for progress in seen)


def test_a_finished_comparison_is_not_measured_again(done):
    results, folder, _ = done
    assert compare(PLAN, SETTING, folder).timings == results.timings


def test_more_lengths_join_what_is_there(done, tmp_path):
    results, folder, _ = done
    (tmp_path / FILE).write_text((folder / FILE).read_text())
    more = compare(Plan(("linear",), (64, 256), ("forward",), rounds=2), SETTING, tmp_path)
    assert more.lengths == [64, 128, 256]
    assert more.timing("linear", 64, "forward") == results.timing("linear", 64, "forward")
    assert len(more.timing("linear", 256, "forward").rounds) == 2


def test_results_of_another_setting_are_kept_and_refused(done, tmp_path):
    _, folder, _ = done
    text = (folder / FILE).read_text()
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ResultsError, match=r"are from another setting or machine \(heads: 2 there, 3 here\).*--fresh"):
        compare(PLAN, Setting(heads=3, head_dim=16, threads=1), tmp_path)
    assert (tmp_path / FILE).read_text() == text


def test_long_cells_are_predicted(tmp_path):
    plan = Plan(("linear",), (64, 128, 2**20), ("forward",), budget=30.0, rounds=1)
    results = compare(plan, SETTING, tmp_path)
    timing = results.timing("sdpa", 2**20, "forward")
    assert timing.status == "predicted"
    assert "s, and the budget allows" in timing.why
    assert timing.predicted > results.timing("sdpa", 128, "forward").rounds[0][0]
    assert results.fact("sdpa", 2**20).status == "predicted"


def test_methods_without_the_direction_are_named(tmp_path):
    plan = Plan(("linear", "nystrom"), (64,), ("forward",), rounds=1)
    results = compare(plan, Setting(heads=2, head_dim=16, threads=1, is_causal=True), tmp_path)
    assert results.methods == ["linear"]
    assert "causal attention" in results.refusals["nystrom"]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(("linaer",), (64,)), "no method is called 'linaer'"),
        (Plan(("linear",), (0,)), "a length must be an integer of tokens from 1"),
        (Plan(("linear",), ()), "at least one method, one length"),
        (Plan(("linear",), (64,), budget=0.0), "the budget must be above 0 minutes; got 0"),
    ],
)
def test_impossible_plans(tmp_path, plan, said):
    with pytest.raises(sq.SubquadError, match=said):
        compare(plan, SETTING, tmp_path)
    assert not (tmp_path / FILE).exists()


def test_a_dead_worker_costs_one_answer():
    with MeasuringWorker(SETTING) as worker:
        assert worker.ask(60, do="time", method="linear", length=64, kind="forward")["seconds"] > 0
        os.kill(worker._worker._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="killed, most likely because memory ran out"):
            worker.ask(60, do="time", method="linear", length=64, kind="forward")
        assert worker.ask(60, do="time", method="linear", length=64, kind="forward")["seconds"] > 0
        assert "MemoryError" not in worker.ask(60, do="facts", method="linear", length=64)
        with pytest.raises(WorkerError, match="no answer within 0 s"):
            worker.ask(0.01, do="time", method="linear", length=4096, kind="training")


def test_a_failure_inside_a_cell_is_its_answer():
    with MeasuringWorker(SETTING) as worker:
        answer = worker.ask(60, do="time", method="linformer", length=64, kind="decode")
        assert answer["failed"].startswith("UnsupportedError: linformer does not support this")


def test_a_method_off_its_reference_is_not_measured(monkeypatch):
    from subquad.ops import dispatch
    from subquad.ops.kernelized import pytorch

    monkeypatch.setattr(pytorch, "_normalize", lambda out, count, rule: (out[..., :-1], out[..., -1:]))
    with dispatch.disabled(), pytest.raises(DisagreementError, match="linear differs from its reference by"):
        require_agreement("linear", SETTING)
    require_agreement("local", SETTING)


def test_a_registered_mechanism_is_compared_if_it_has_a_reference(third_party, tmp_path):
    plan = Plan(("checked_squares", "unchecked_squares"), (64,), ("forward", "decode"), rounds=1)
    results = compare(plan, SETTING, tmp_path)
    assert results.methods == ["checked_squares"]
    assert all(results.timing("checked_squares", 64, kind).rounds for kind in plan.passes)
    assert results.refusals["unchecked_squares"] == (
        "it has no reference to be checked against: set Unchecked.reference, see subquad.reference"
    )
    results.timing("checked_squares", 64, "forward").rounds = [(0.1, 1.0)] * 3
    assert advise(64, results=results)[0].code == 'sq.attention(q, k, v, "checked_squares")'
    write_page(results, tmp_path / "page.html")
    assert "checked_squares" in (tmp_path / "page.html").read_text()


def test_a_mechanism_of_a_script_is_refused(third_party, monkeypatch, tmp_path):
    monkeypatch.setattr(third_party.Checked, "__module__", "__main__")
    with pytest.raises(
        sq.InputError, match=r"Checked must be defined in a module that .*script or notebook\. Move it to a file"
    ):
        compare(Plan(("checked_squares",), (64,)), SETTING, tmp_path)


def test_peak_bytes_are_those_of_the_tensors():
    x = torch.ones(1000, 1000)
    assert peak_bytes(lambda: (x + 1) + 1, "cpu")[0] == pytest.approx(2 * x.nbytes, abs=1000)
    assert peak_bytes(lambda: (x + 1).sum(), "cpu")[0] == pytest.approx(x.nbytes, abs=1000)


def test_the_error_of_softmax_itself_is_none():
    qkv = inputs(SETTING, 50)
    exact = call("sdpa", SETTING, 50, qkv)()
    assert error(call("softmax", SETTING, 50, qkv)(), exact) < 1e-6
    assert error(call("linear", SETTING, 50, qkv)(), exact) > 0.01


def test_errors_on_the_inputs_of_a_model(tmp_path):
    q, k, v = (torch.randn(1, 3, 100, 8) for _ in range(3))
    torch.save({"query": q * 5, "key": k * 5, "value": v}, tmp_path / "qkv.pt")
    plan = Plan(("linear", "local"), (64, 128), ("forward",), rounds=1, qkv=tmp_path / "qkv.pt")
    results = compare(plan, SETTING, tmp_path)
    exact = torch.nn.functional.scaled_dot_product_attention(q[:, :, :64] * 5, k[:, :, :64] * 5, v[:, :, :64])
    found = sq.attention(q[:, :, :64] * 5, k[:, :, :64] * 5, v[:, :, :64], "linear")
    expected = float((found - exact).norm() / exact.norm())
    assert results.fact("linear", 64).errors["real"] == pytest.approx(expected, rel=1e-4)
    assert set(results.fact("linear", 128).errors) == {"random"}  # only 100 tokens are there


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"query": torch.zeros(1, 1, 2, 2)}, "must contain tensors named query, key and value; got query"),
        ({"query": torch.zeros(2, 2), "key": torch.zeros(2, 2), "value": torch.zeros(2, 2)}, "must have one shape"),
        (dict.fromkeys(("query", "key", "value"), torch.full((1, 2, 64, 4), torch.nan)), "must be finite; got NaN"),
        (None, "cannot be read as saved tensors"),
    ],
)
def test_inputs_of_a_model_that_do_not_fit(tmp_path, saved, said):
    path = tmp_path / "qkv.pt"
    path.write_bytes(b"no tensors") if saved is None else torch.save(saved, path)
    with pytest.raises(sq.InputError, match=said):
        compare(Plan(("linear",), (64,), qkv=path), SETTING, tmp_path)


def test_inputs_of_a_model_may_come_later_but_not_change(tmp_path):
    first = Plan(("linear",), (64,), ("forward",), rounds=1)
    compare(first, SETTING, tmp_path / "out")
    for name in ("a", "b"):
        q, k, v = inputs(SETTING, 64, seed=ord(name))
        torch.save({"query": q, "key": k, "value": v}, tmp_path / f"{name}.pt")
    found = compare(replace(first, qkv=tmp_path / "a.pt"), SETTING, tmp_path / "out")
    assert set(found.fact("linear", 64).errors) == {"random", "real"}
    assert found.inputs.startswith("a.pt (")
    with pytest.raises(ResultsError, match=r"were measured on the inputs a.pt \(\w+\); got b.pt"):
        compare(replace(first, qkv=tmp_path / "b.pt"), SETTING, tmp_path / "out")


@pytest.mark.parametrize("name", ["junk.pt", "junk.safetensors", "junk.txt"])
def test_files_that_hold_no_tensors(tmp_path, name):
    (tmp_path / name).write_text("i am a poem")
    with pytest.raises(sq.InputError, match="cannot be read as saved tensors"):
        compare(Plan(("linear",), (64,), qkv=tmp_path / name), SETTING, tmp_path)


def test_two_comparisons_do_not_share_a_folder(tmp_path):
    with exclusive(tmp_path, "comparison"), pytest.raises(ResultsError, match="another comparison is writing to"):
        compare(Plan(("linear",), (64,)), SETTING, tmp_path)
    with exclusive(tmp_path, "comparison"):
        pass


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_what_was_finished(tmp_path):
    """The file can be read, and no finished cell is lost; as often as SUBQUAD_KILLS says."""
    path = tmp_path / FILE
    code = (
        "from pathlib import Path; from subquad.bench import *\n"
        "compare(Plan(('linear', 'taylor'), (64, 128, 256), rounds=1000, budget=600), "
        f"Setting(heads=2, head_dim=16, threads=1), Path({str(tmp_path)!r}))"
    )
    draw, rounds = random.Random(0), {}
    for _ in range(int(os.environ.get("SUBQUAD_KILLS", "5"))):
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True)
        writes, waited = {path.stat().st_mtime_ns if path.exists() else 0}, time.monotonic()
        while len(writes) < 5 and time.monotonic() - waited < 60:  # it has begun to measure
            writes.add(path.stat().st_mtime_ns if path.exists() else 0)
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 2))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        now = {(t.method, t.length, t.kind): t.rounds for t in load(path).timings}
        for cell, measured in rounds.items():
            assert now[cell][: len(measured)] == measured
        rounds = now
    assert sum(map(len, rounds.values())) > 20
    assert json.loads(Path(path).read_text())["finished"] is False
