"""The suite behind docs/results.md: stopped, killed, failing, changed, it ends with every cell, and trains none twice."""

import contextlib
import io
import json
import os
import shlex
import signal
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from benchmarks import results
from benchmarks.suite import cells, page, records, session, times
from benchmarks.suite.cells import Table
from typer.testing import CliRunner

import subquad as sq
from subquad import training
from subquad.cli import app
from subquad.registry import options_of, resolve
from subquad.runs import checkpoints
from subquad.runs.determinism import deterministic
from subquad.runs.progress import no_transformers_bars
from subquad.tasks.rows import row_count
from subquad.training import Results
from subquad.training.data import Batches, loader
from subquad.training.plan import Plan, choose_methods, class_path, find_task
from tests.training.weights import equal, last

SMALL = {"layers": 1, "dim": 8, "heads": 2, "batch": 4}
SHORT = Table(
    name="short", title="Short", task="digits", about="", minutes=1, methods=("softmax",), given={**SMALL, "steps": 3}
)
LONG = Table(
    name="long", title="Long", task="digits", about="", minutes=1, methods=("linear",),
    given={**SMALL, "steps": 400, "save_every": 20, "eval_every": 400},
)  # fmt: skip
BROKEN = Table(
    name="broken", title="Broken", task="cifar10", about="", minutes=1, methods=("linear",), given={**SMALL, "steps": 3}
)
HOUR = 3600.0
# As the suite's own, but that it trains itself rather than start another process, which takes its time to import.
CHILD = """
import functools, runpy
from subquad import training
training.train = functools.partial(training.train, in_worker=False)
runpy.run_module("benchmarks.suite.worker", run_name="__main__")
"""
MARKS = "# Results\n\n<!-- made from benchmarks/results.json -->\nold\n<!-- end -->\n"


@dataclass
class Start:
    """What one start of the suite has left."""

    code: int
    printed: str
    started: list[str]
    records: dict[str, Any]
    page: str
    step: int  # of the long cell's checkpoint
    training: Any  # its record, in its folder


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """Three starts: a cell is killed and one fails; Ctrl-C; the rest, with other settings for a cell that was done."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "page.md").write_text(MARKS)
    (folder / "data").mkdir()
    out, patch = folder / "out", pytest.MonkeyPatch()
    started: list[str] = []

    def begin(self, cell, begin=session.Session._start):
        started.append(cell.name)
        begin(self, cell)

    def saved():
        newest = checkpoints.latest(out / "long/linear/linear")
        return 0 if newest is None else checkpoints.step_of(newest)

    def long():
        return training.load(out / "long/linear/results.json").records[0]

    def start(*tables, then=lambda process: None, after=0):
        """Start it, and when the long cell has a checkpoint of a step above `after`, do something to its process."""
        started.clear()
        acted: list[bool] = []

        def show(bar, now, show=results._on_progress):
            show(bar, now)
            if "long/linear" in now.running and saved() > after and not acted:
                acted.append(True)
                then(now.running["long/linear"][1])

        with pytest.MonkeyPatch.context() as here:
            here.setattr(cells, "TABLES", tables)
            here.setattr(results, "_on_progress", show)
            line = ["--out", str(out), "--data", str(folder / "data"), "--results", str(folder / "results.json")]
            code, printed = run([*line, "--page", str(folder / "page.md")])
        found = json.loads((folder / "results.json").read_text())["records"]
        return Start(code, printed, list(started), found, (folder / "page.md").read_text(), saved(), long())

    patch.setattr(session.Session, "_start", begin)
    patch.setattr(session, "POLL_INTERVAL", 0.02)
    patch.setattr(session, "WORKER", [sys.executable, "-c", CHILD])
    patch.setenv("OMP_NUM_THREADS", "1")
    killed = start(SHORT, LONG, BROKEN, then=lambda process: process.kill())
    stopped = start(SHORT, LONG, then=lambda process: os.kill(os.getpid(), signal.SIGINT), after=killed.step)
    state = out / f"long/linear/linear/checkpoint-{stopped.step}/run.json"
    before = json.loads(state.read_text())
    state.write_text(json.dumps({**before, "record": {**before["record"], "seconds": HOUR}}))
    checkpoints.write_checksums(state.parent)
    finished = start(replace(SHORT, given={**SMALL, "steps": 4}), LONG)
    patch.undo()
    return killed, stopped, finished


def run(line):
    """The exit code, and what was printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as caught:
        results.main(line)
    return caught.value.code, " ".join(said.getvalue().split())


@pytest.mark.slow
def test_every_cell_runs_and_what_fails_is_recorded_with_its_reason(starts):
    killed, _, _ = starts
    assert killed.code == 1
    assert sorted(killed.started) == ["broken/linear", "long/linear", "short/softmax"]
    assert {name: record["status"] for name, record in killed.records.items()} == {
        "broken/linear": "failed", "long/linear": "failed", "short/softmax": "done",
    }  # fmt: skip
    assert killed.records["broken/linear"]["why"].startswith("cifar10 needs the folder")
    assert killed.records["long/linear"]["why"] == "the process was ended by signal 9"
    assert "1 of 3 cells are done. The same command continues with the rest." in killed.printed


def test_a_record_says_all_there_is_to_know(starts):
    record = starts[0].records["short/softmax"]
    assert (record["task"], record["method"], record["seed"], record["threads"], record["jobs"]) == (
        "digits",
        "softmax",
        0,
        1,
        2,
    )
    assert (record["step"], record["settings"]["steps"], record["settings"]["dim"]) == (3, 3, 8)
    assert record["metric"] == "accuracy"
    assert record["score"] == record["test"]["accuracy"]
    assert all(record[name] > 0 for name in ("step_seconds", "peak_bytes", "parameters", "seconds"))
    assert record["machine"]["cores"] == os.cpu_count()
    assert shlex.split(record["command"])[:5] == ["subquad", "train", "digits", "--method", "softmax"]
    assert "losses" not in record


def test_ctrl_c_stops_with_a_checkpoint_and_what_is_done_is_not_run_again(starts):
    killed, stopped, _ = starts
    assert stopped.code == 130
    assert stopped.started == ["long/linear"]
    assert killed.step < stopped.step < 400
    assert (stopped.training.status, stopped.training.step) == ("stopped", stopped.step)
    assert stopped.records["long/linear"]["status"] == "failed"  # the last that is known
    assert stopped.records["broken/linear"] == killed.records["broken/linear"]  # records of other tables are kept


def test_it_goes_on_and_runs_again_what_has_other_settings(starts):
    _, _, finished = starts
    assert finished.code == 0
    assert sorted(finished.started) == ["long/linear", "short/softmax"]
    long, short = (finished.records[name] for name in ("long/linear", "short/softmax"))
    assert (long["status"], long["step"], short["status"], short["step"]) == ("done", 400, "done", 4)
    assert "2 of 2 cells are done." in finished.printed
    assert long["seconds"] > HOUR  # of all sessions


def test_the_page_is_made_from_the_records(starts):
    killed, stopped, finished = starts
    assert "| `linear` | failed: the process was ended by signal 9 |" in killed.page
    assert "1 of 2 training runs are complete." in stopped.page
    assert "2 of 2 training runs are complete." in finished.page
    assert finished.page.startswith("# Results\n")
    assert finished.page.endswith("<!-- end -->\n")
    assert "steps 4" in finished.page
    assert (
        "`subquad train digits --method softmax --layers 1 --dim 8 --heads 2 --batch 4 --steps 4 --threads 1`" in finished.page
    )


@pytest.fixture
def tables(monkeypatch):
    def tables(*given):
        monkeypatch.setattr(cells, "TABLES", given)

    return tables


def made(cell, **figures):
    """A record, as if the cell had been run."""
    found = {"status": "done", "why": "", "method": cell.method, "step_seconds": 0.5, "peak_bytes": 2**30, "parameters": 1000}
    found |= {"seconds": 90.0, "step": 60, "threads": 1, "jobs": 2, "commit": "abc1234", "test": {"accuracy": 0.5, "loss": 1.5}}
    machine = {"processor": "P", "cores": 2, "system": "S", "torch": "1", "python": "3"}
    return {**found, "machine": machine, **cell.identity(), **figures}


def timed(table, **milliseconds):
    """Times, as if the table had been measured."""
    rows = {row.label: row.cells[0] for row in table.rows()}
    first = milliseconds[next(iter(rows))]
    figures = {
        label: {
            "milliseconds": own, "of_base": own / first, "of_base_80_percent": [own / first - 0.1, own / first + 0.1],
            "bytes": int(own * 2**20),
        }
        for label, own in milliseconds.items()
    }  # fmt: skip
    machine = {"processor": "P", "cores": 2, "threads": 1, "system": "S", "torch": "1", "python": "3", "commit": "abc1234"}
    saved = {label: {**rows[label].identity(), **figure} for label, figure in figures.items()}
    return {"machine": machine, "rounds": 25, "rows": saved, "left_out": {}}


def shown(table, *rows, times=None):
    """The lines of the table with what is given for its cells."""
    every = [cell for row in table.rows() for cell in row.cells]
    saved = {cell.name: made(cell, **row) for cell, row in zip(every, rows, strict=False)}
    return page.section({"records": saved}, {table.name: times} if times else {}).splitlines()


def test_the_best_comes_first_with_its_cost_beside_softmax(tables):
    tables(replace(SHORT, methods=("softmax", "linear", "local")))
    [table] = cells.TABLES
    learned = {"test": {"accuracy": 0.75, "loss": 1.0}}
    lines = shown(table, {}, learned, times=timed(table, softmax=500.0, linear=250.0, local=400.0))
    head = "| method | accuracy | loss | step time | time vs. `softmax` | step memory | memory vs. `softmax` | parameters | minutes | options |"
    first = lines.index(head) + 2
    assert lines[first : first + 3] == [
        "| `linear` | 75.0% | 1.000 | 250 ms | 0.50 (0.40 to 0.60) | 250 MiB | 0.50 | 1,000 | 1.5 |  |",
        "| `softmax` | 50.0% | 1.500 | 500 ms | 1 | 500 MiB | 1.00 | 1,000 | 1.5 |  |",
        "| `local` | not run yet |  | 400 ms | 0.80 (0.70 to 0.90) | 400 MiB | 0.80 |  |  |  |",
    ]
    where = "P, 2 cores, 1 thread, S, PyTorch 1, Python 3"
    assert f"- Trained on: {where}; 2 training runs in parallel; commit abc1234." in lines
    line = "python benchmarks/results.py --times --only short --rounds 25"
    assert f"- Step times: `{line}`, on {where}; commit abc1234." in lines


def test_options_fit_the_length_and_stand_in_the_table_and_in_the_command(tables):
    tables(replace(SHORT, methods=("softmax", "local"), given={**SHORT.given, "length": 64}))
    [table] = cells.TABLES
    _, row = table.rows()
    assert row.cells[0].mechanism == sq.Local(window=8)
    assert " ".join(row.cells[0].command()).endswith("--method-option local.window=8 --threads 1")
    assert any(line.startswith("| `local` |") and line.endswith("| window=8 |") for line in shown(table, {}, {}))


def test_without_times_the_page_says_how_to_measure_them(tables):
    tables(replace(SHORT, methods=("softmax", "linear")))
    [table] = cells.TABLES
    assert "| `softmax` | 50.0% | 1.500 | - | - | - | - | 1,000 | 1.5 |  |" in shown(table, {})
    line = "`python benchmarks/results.py --times --only short`"
    assert f"- Step times have not been measured yet. Command: {line}." in shown(table)
    before = timed(replace(table, given={**table.given, "dim": 16}), softmax=500.0, linear=250.0)
    lines = shown(table, {}, times=before)
    assert "| `softmax` | 50.0% | 1.500 | - | - | - | - | 1,000 | 1.5 |  |" in lines
    assert f"- Some step times (`-`) were measured with other settings and are not shown. Command: {line}." in lines


def test_what_cannot_do_the_task_is_there_with_the_reason(tables):
    tables(replace(LONG, task="recall", methods=(), given={"length": 64, "steps": 3}))
    lines = shown(cells.TABLES[0])
    for method in sq.methods():
        why = sq.why_not(resolve(method).for_length(64), is_causal=True, decode=True)
        assert any(line.startswith(f"| `{method}` | {'no: ' + why[0] if why else ''}") for line in lines), method


@pytest.mark.parametrize("name", ["listops-128", "listops-256"])
def test_what_a_guess_would_score_at_listops(name):
    [table] = [table for table in cells.TABLES if table.name == name]
    counts = find_task("listops").load(None, table.settings).test.labels.bincount()
    assert f"right for {counts.max() / counts.sum():.1%}" in table.about


def test_all_scores_stand_in_one_table(tables):
    recall = replace(LONG, name="recall-64", task="recall", methods=(), given={"length": 64, "steps": 3})
    tables(replace(SHORT, methods=("softmax", "linear", "induced")), recall, replace(SHORT, name="timed", is_trained=False))
    saved = {
        "short/softmax": {},
        "recall-64/softmax": {"test": {"accuracy": 1.0, "loss": 0.0}},
        "short/linear": {"status": "diverged"},
    }
    every = {cell.name: cell for cell in cells.selected(cells.TABLES, [])}
    found = {"records": {name: made(every[name], **row) for name, row in saved.items()}}
    head, _, *lines = page.overview(found).splitlines()
    assert head == "| method | `short`, accuracy | `recall-64`, accuracy |"
    assert {
        "| `softmax` | 50.0% | 100.0% |",
        "| `linear` | diverged | not run yet |",
        "| `local` | - | not run yet |",
        "| `induced` | not run yet | no |",
    } <= set(lines)
    assert page.overview(found) in page.section(found, {})


def test_seeds_give_a_range(tables):
    tables(replace(SHORT, seeds=(0, 1, 2), variants={"fp32": {}, "bf16": {"precision": "bf16"}}))
    lines = shown(cells.TABLES[0], *({"test": {"accuracy": a, "loss": 1.0}} for a in (0.5, 0.6, 0.7, 0.8)))
    assert any(line.startswith("| `fp32` | 60.0% (50.0% to 70.0%) |") for line in lines)
    assert any(line.startswith("| `bf16` | 80.0% (80.0% to 80.0%, 1 of 3 seeds) |") for line in lines)
    assert [cell.settings.seed for cell in cells.TABLES[0].rows()[1].cells] == [0, 1, 2]


def test_a_table_that_is_not_trained_projects_the_time_of_a_step(tables):
    tables(replace(SHORT, methods=("softmax", "linear"), given={**SMALL, "steps": 3000}, is_trained=False))
    [table] = cells.TABLES
    lines = shown(table, times=timed(table, softmax=2000.0, linear=500.0))
    heading = "| method | step time | time vs. `softmax` | step memory | memory vs. `softmax` | 3,000 steps, projected |"
    assert heading in lines
    assert "| `softmax` | 2 s | 1 | 1.95 GiB | 1.00 | 100 min |" in lines
    assert "| `linear` | 500 ms | 0.25 (0.15 to 0.35) | 500 MiB | 0.25 | 25 min |" in lines
    assert "| `linear` | - | - | - | - | - |" in shown(table)
    assert lines[0] == "0 of 0 training runs are complete."


def test_nothing_to_train_is_said(capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        results.main(["--only", "pixels", "--out", str(tmp_path)])
    assert caught.value.code == 2
    assert "measure step times with --times" in capsys.readouterr().err


def test_reasons_do_not_break_the_table(tables):
    tables(SHORT)
    lines = shown(cells.TABLES[0], {"status": "diverged", "why": "the loss | is nan at step 3;\nmore in /some/where"})
    assert "| `softmax` | diverged: the loss \\| is nan at step 3 |  |  |  |  |  |  |  |  |" in lines


def test_a_record_of_other_settings_is_not_used(tables):
    tables(SHORT)
    [cell] = cells.selected(cells.TABLES, [])
    saved = {cell.name: made(cell)}
    assert records.of(cell, saved) == saved[cell.name]
    tables(replace(SHORT, given={**SHORT.given, "dim": 16}))
    [cell] = cells.selected(cells.TABLES, [])
    assert records.of(cell, saved) is None


VARIANTS = {"fp32": {}, "bf16": {"precision": "bf16"}, "checkpointing": {"checkpointing": True}}


@pytest.fixture
def times_of(tmp_path):
    """Start the measurement, and return exit code, what was printed, times.json and the page."""
    (tmp_path / "page.md").write_text(MARKS)

    def times_of(*more):
        where = ["--results", str(tmp_path / "results.json"), "--page", str(tmp_path / "page.md")]
        code, printed = run(["--times", "--rounds", "2", *where, *more])
        return code, printed, times.read(tmp_path / "times.json"), (tmp_path / "page.md").read_text()

    return times_of


def test_steps_are_timed_in_turns_and_no_table_twice(tables, times_of, monkeypatch):
    taken = []

    def step(self, batch, step=times.Runner._step):
        taken.append((self.cell.name, batch["labels"].tolist()))
        return step(self, batch)

    monkeypatch.setattr(times.Runner, "_step", step)
    three = replace(SHORT, methods=("softmax", "linear", "local"))
    deep = {**SHORT.given, "layers": 4, "dim": 16, "batch": 64}
    other = replace(SHORT, name="other", methods=("linear",), variants=VARIANTS, given=deep)
    tables(three, other)
    code, printed, found, shown = times_of("--only", "short")
    assert code == 0
    assert set(found) == {"short"}
    rounds = [taken[i : i + 3] for i in range(0, len(taken), 3)]
    assert len(rounds) == times.WARM_UP + 2 + 1
    assert rounds.pop()[0][1] == rounds[-1][0][1]  # what a step holds: one more, on the last batch
    assert all({name for name, _ in now} == {"short/softmax", "short/linear", "short/local"} for now in rounds)
    assert all(len({tuple(labels) for _, labels in now}) == 1 for now in rounds)  # the same batch
    assert len({tuple(now[0][1]) for now in rounds}) > 1  # another in the next round
    assert len({tuple(name for name, _ in now) for now in rounds}) > 1  # shuffled
    taken.clear()
    code, printed, found, shown = times_of()
    assert "short: already measured" in printed
    assert {name for name, _ in taken} == {"other/fp32", "other/bf16", "other/checkpointing"}
    assert (found["short"]["rounds"], found["short"]["machine"]["threads"], found["short"]["base"]) == (2, 1, "softmax")
    for row in found["short"]["rows"].values():
        low, high = row["milliseconds_80_percent"]
        assert 0 < low <= row["milliseconds"] <= high
    held = {label: row["bytes"] for label, row in found["other"]["rows"].items()}
    assert held["checkpointing"] < held["bf16"] < held["fp32"]
    assert found["short"]["rows"]["softmax"]["of_base"] == 1
    assert found["short"]["command"].startswith("python benchmarks/results.py --times")
    assert "- Step times: `python benchmarks/results.py --times --only other --rounds 2`" in shown
    taken.clear()
    times_of("--only", "short", "--again")
    assert {name for name, _ in taken} == {"short/softmax", "short/linear", "short/local"}
    taken.clear()
    tables(replace(three, given={**three.given, "dim": 16}))
    times_of()
    assert len(taken) == 3 * (times.WARM_UP + 2 + 1)


def test_a_row_that_fails_is_left_out_with_the_reason(tables, times_of, monkeypatch):
    def step(self, batch, step=times.Runner._step):
        if self.cell.method == "local":
            raise ArithmeticError("the loss is nan")
        return step(self, batch)

    monkeypatch.setattr(times.Runner, "_step", step)
    tables(replace(SHORT, methods=("softmax", "local")))
    code, _, found, shown = times_of()
    assert code == 1
    assert found["short"]["left_out"] == {"local": "ArithmeticError: the loss is nan"}
    assert set(found["short"]["rows"]) == {"softmax"}
    assert "Left out: `local`, ArithmeticError: the loss is nan." in shown


def runner(cell, folder):
    with deterministic(1), no_transformers_bars():
        task = find_task(cell.task)
        splits = task.load(None, cell.settings)
        batches = Batches(row_count(splits.train), cell.settings.batch, 3, cell.settings.seed)
        return times.Runner(cell, task, splits, batches, folder), loader(splits, batches)


def test_a_timed_step_is_that_of_a_training(tmp_path):
    cell = SHORT.rows()[0].cells[0]
    found, batches = runner(cell, tmp_path / "timed")
    with deterministic(1):
        for batch in batches:
            found.run(batch)
    training.train(find_task("digits"), ["softmax"], cell.settings, tmp_path / "run", threads=1, in_worker=False)
    assert equal(found.trainer.model.state_dict(), last(tmp_path / "run" / "softmax"))


@pytest.mark.parametrize(
    ("label", "halves", "recomputes"), [("fp32", False, False), ("bf16", True, False), ("checkpointing", False, True)]
)
def test_precision_and_checkpointing_stay_with_their_row(label, halves, recomputes, tmp_path):
    table = replace(SHORT, methods=("linear",), variants=VARIANTS)
    runners = {row.label: runner(row.cells[0], tmp_path) for row in table.rows()}
    found, batches = runners[label]
    seen = []
    block = next(m for m in found.trainer.model.modules() if isinstance(m, sq.Attention))
    block.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    found.run(next(iter(batches)))
    assert seen == [halves] * (2 if recomputes else 1)


@pytest.mark.parametrize("cell", cells.selected(cells.TABLES, []), ids=lambda cell: cell.name)
def test_the_command_of_a_cell_trains_what_is_declared(cell, monkeypatch):
    def train(task, methods, settings, out, *, precision, checkpointing, eval_every, save_every, eval_rows, threads, **_):
        given = {"precision": precision, "checkpointing": checkpointing, "eval_every": eval_every, "save_every": save_every}
        plan = Plan(task=class_path(task), settings=settings, threads=threads, eval_rows=eval_rows, **given)
        [config] = choose_methods(task, methods, settings)[0].values()
        assert {"settings": plan.identity(), "options": options_of(config)} == cell.identity()
        assert (config, threads) == (cell.mechanism, 1)
        return Results({}, {}, {})

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr("subquad.cli.train._written", lambda results, folder: [])
    found = CliRunner().invoke(app, [*cell.command(), "--json"])
    assert found.exit_code == 0, found.exception


def test_every_method_is_in_the_tables_of_tasks():
    tables = {table.name: table for table in cells.TABLES}
    for name in ("cifar10", "listops-128", "listops-256", "recall-64", "recall-256", "wikitext2"):
        assert {row.label for row in tables[name].rows()} | set(tables[name].refused()) == set(sq.methods())


def test_the_list_says_what_is_done_and_what_is_left(tables, tmp_path):
    tables(replace(SHORT, methods=("softmax", "linear", "local")), replace(LONG, minutes=60))
    done, other, _, _ = cells.selected(cells.TABLES, [])
    records.merge(tmp_path / "results.json", done, made(done))
    records.merge(tmp_path / "results.json", other, made(other, options={"of": "another"}))
    before = sorted(tmp_path.iterdir())
    code, printed = run(["--list", "--results", str(tmp_path / "results.json"), "--out", str(tmp_path / "out")])
    assert code == 0
    assert "short/softmax │ done │ 1.5 │ 1.5" in printed
    assert "short/linear │ waiting: other settings" in printed
    assert "short/local │ waiting" in printed
    assert "1 of 4 cells are done; about 31 min 30 s left, 2 in parallel." in printed  # (1.5 + 1.5 + 60) / 2
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--only", "cifar"], "got cifar"),
        (["--methods", "lin"], "got lin"),
        (["--jobs", "0"], "at least 1; got 0"),
        (["--times", "--rounds", "0"], "at least 1; got 0"),
        (["--times", "--methods", "linear"], "leave out --methods and --list"),
        (["--minutes", "0"], "above 0; got 0.0"),
        (["--results", "/nowhere/results.json"], "in an existing directory"),
    ],
)
def test_bad_arguments(line, said, capsys):
    with pytest.raises(SystemExit):
        results.main(line)
    assert said in capsys.readouterr().err


def test_tables_are_chosen_by_name_or_by_what_is_before_the_dash():
    options = results.parse(["--only", "recall, cifar10"])
    found = [t.name for t in cells.TABLES if any(results._is_named(t.name, word) for word in options.only)]
    assert found == ["cifar10", "recall-64", "recall-256"]


def test_a_file_of_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(SystemExit) as caught:
        results.main(["--list", "--results", str(tmp_path / "results.json")])
    assert caught.value.code == 2
    assert "must have schema 'subquad.results'" in capsys.readouterr().err
