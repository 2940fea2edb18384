"""`subquad train`, from the command line."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import subquad as sq
from subquad.cli import app, terminal
from subquad.cli.train import _methods, _sparkline
from subquad.runs.lock import exclusive
from subquad.runs.progress import Progress
from subquad.tasks import TASKS
from subquad.training import Record, Results, load, train
from tests.training.weights import equal, last

SIZES = {"layers": 1, "dim": 16, "heads": 2, "batch": 16, "steps": 120, "dropout": 0.1}


def command(out, *more):
    sizes = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
    line = [sys.executable, "-m", "subquad", "train", "digits", "--method", "linear", *sizes]
    line += ["--save-every", "10", "--threads", "1", "--out", str(out), *more]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def until_saved(process, out, step):
    """Wait for the checkpoint of that step, or of a later one."""
    while process.poll() is None:
        steps = [int(path.name.split("-")[1]) for path in (out / "linear").glob("checkpoint-*")]
        if max(steps, default=0) >= step:
            return
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_survives_ctrl_c_and_kill_and_ends_with_the_same_bits(tmp_path):
    out = tmp_path / "run"
    first = command(out)
    until_saved(first, out, 10)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "the same command with --resume continues it" in " ".join(said.split())
    stopped = load(out / "results.json").records[0]
    assert (stopped.status, 10 <= stopped.step < 120) == ("stopped", True)

    second = command(out, "--resume")
    until_saved(second, out, stopped.step + 10)
    second.kill()
    second.communicate()
    assert second.returncode == -9
    while True:  # the process that trains sees that it is alone, and ends
        try:
            with exclusive(out, "training"):
                break
        except sq.SubquadError:
            time.sleep(0.05)
    assert load(out / "results.json").records[0].status == "running"

    settings = replace(TASKS["digits"].info.defaults, epochs=None, **SIZES)
    train(TASKS["digits"](), ["linear"], settings, out, threads=1, resume=True, in_worker=False)
    train(TASKS["digits"](), ["linear"], settings, tmp_path / "whole", threads=1, in_worker=False)
    assert equal(last(out / "linear"), last(tmp_path / "whole" / "linear"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["digit", "--method", "linear"], "no task is called 'digit'; did you mean 'digits'? Tasks: digits,"),
        (["digits"], "a run needs at least one method"),
        (
            ["digits", "--method", "linear", "--steps", "3", "--epochs", "1"],
            "pass either steps or epochs, which both set the length of a run; got steps=3 and epochs=1.0",
        ),
        (["digits", "--method", "lin"], "no method is called 'lin'"),
        (["digits", "--method", "linear", "--option", "a"], "Write it as --option tokens=pixels"),
        (["digits", "--method", "linear", "--option", "a=b"], "digits has no option 'a'"),
        (
            ["digits", "--method", "all", "--method-option", "features=3"],
            "--method-option needs methods by name; got --method all",
        ),
        (["digits", "--method", "linear,local", "--method-option", "window=3"], "method.name=value"),
        (["digits", "--method", "local", "--method-option", "widow=3"], "widow"),
        (["digits", "--method", "linear", "--method-option", "performer.features=3"], "for one of the methods (linear)"),
        (["digits", "--method", "local", *["--method-option", "window=3"] * 2], "--method-option local.name=value"),
        (["digits", "--method", "LINEAR"], "did you mean 'linear'"),
        (["digits", "--method", "linear", "--resume", "--fresh"], "got --resume and --fresh"),
        (["digits", "--method", "linear", "--data", "here"], "digits needs no data folder"),
        (["listops", "--method", "linear", "--data", "here"], "listops needs no data folder"),
        (["recall", "--method", "nystrom"], "nystrom does not support this"),
    ],
)
def test_bad_input_is_refused(line, said, tmp_path):
    result = CliRunner().invoke(app, ["train", *line, "--out", str(tmp_path / "run")])
    assert isinstance(result.exception, sq.SubquadError)
    assert said in str(result.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [["train", "digits", "--method", "linear"], ["compare"], ["convert", "model"]])
def test_an_empty_name_is_no_folder(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*command, "--out", ""], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "a folder must have a name; got an empty one" in result.output
    assert not list(tmp_path.iterdir())


def test_tasks_are_listed_however_narrow_the_window_is():
    printed = CliRunner().invoke(app, ["train"], env={"COLUMNS": "40"}).stdout
    assert all(name in printed and task.info.kind in printed for name, task in TASKS.items())
    assert "…" not in printed


def test_figures_are_whole_in_a_narrow_window_and_with_json_there_is_a_page(tmp_path):
    sizes = shlex.split("--steps 2 --batch 4 --layers 1 --dim 8 --heads 2 --threads 1 --eval-rows 4")
    line = ["train", "digits", "--method", "linear", *sizes, "--out", str(tmp_path)]
    found = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)["records"][0]
    assert (tmp_path / "report.html").exists()
    printed = CliRunner().invoke(app, line, env={"COLUMNS": "30"}).stdout
    assert f"{found['test']['accuracy']:.4g}" in printed
    assert "…" not in printed


def test_a_method_that_refuses_to_be_built_is_no_success(tmp_path, monkeypatch):
    record = Record("linear", status="refused", why="no", steps=3)
    table = {"metric": "accuracy", "higher_is_better": True, "name": "digits", "idea": ""}
    monkeypatch.setattr("subquad.training.train", lambda *_, **__: Results(table, {}, {}, records=[record]))
    monkeypatch.setattr("subquad.cli.train._written", lambda results, folder: [])
    monkeypatch.setattr("subquad.cli.train._print", lambda *_: None)
    assert CliRunner().invoke(app, ["train", "digits", "--method", "linear"]).exit_code == 1
    record.steps = None  # one that `all` leaves out
    assert CliRunner().invoke(app, ["train", "digits", "--method", "linear"]).exit_code == 0


def test_options_go_to_their_method():
    assert _methods("performer, local", ["performer.features=32"]) == [sq.Performer(features=32), "local"]
    assert _methods("local", ["window=3", "local.dilation=2"]) == [sq.Local(window=3, dilation=2)]
    assert _methods("all", []) == ["all"]
    assert _methods("rfa", ["floor=0.5"]) == [sq.RFA(floor=0.5)]


def test_without_a_terminal_a_line_from_time_to_time_says_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "LINE_EVERY", -1.0)
    for is_shown in (True, False):
        with terminal.Bar(is_shown) as bar:
            bar.show(Progress("linear, step 3 [1/2]", 0.25, 9.0))
        assert capsys.readouterr().err == ("linear, step 3 [1/2], 25%, about 9 s left\n" if is_shown else "")


def test_a_curve_in_a_few_characters():
    assert _sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert _sparkline([1.0]) == "▁"
    assert _sparkline([]) == ""
    assert len(_sparkline(list(range(100)), 12)) == 12


def test_a_diverged_method_is_a_row_with_a_reason_and_an_exit_code(tmp_path):
    line = ["train", "digits", "--method", "linear", "--lr", "1e4", "--steps", "60", "--warmup", "0", "--batch", "4"]
    result = CliRunner().invoke(
        app, [*line, "--layers", "1", "--dim", "8", "--heads", "2", "--threads", "1", "--out", str(tmp_path)]
    )
    assert result.exit_code == 1, result.output
    assert "diverged" in result.stdout
    assert (tmp_path / "report.html").exists()
    assert "lower --lr than 10000" in " ".join(result.stdout.split())
    assert json.loads((tmp_path / "results.json").read_text())["records"][0]["status"] == "diverged"


def test_a_missing_extra_says_how_to_get_it():
    code = "import sys; sys.modules['accelerate'] = None; from subquad.cli import main; sys.argv = ['subquad', 'train', 'digits']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'subquad[train]'" in " ".join(done.stderr.split())
