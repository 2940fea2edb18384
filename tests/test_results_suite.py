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
from benchmarks import results
from benchmarks.suite import cells, page, records, sitting
from benchmarks.suite.cells import Table
from typer.testing import CliRunner

import subquad as sq
from subquad import training
from subquad.cli import app
from subquad.training import Results, checkpoints
from subquad.training.plan import Plan, configured, options_of, place

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
training.train = functools.partial(training.train, is_apart=False)
runpy.run_module("benchmarks.suite.child", run_name="__main__")
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

    def begin(self, cell, begin=sitting.Sitting._start):
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

        def show(bar, now, show=results._show):
            show(bar, now)
            if "long/linear" in now.running and saved() > after and not acted:
                acted.append(True)
                then(now.running["long/linear"][1])

        with pytest.MonkeyPatch.context() as here:
            here.setattr(cells, "TABLES", tables)
            here.setattr(results, "_show", show)
            line = ["--out", str(out), "--data", str(folder / "data"), "--results", str(folder / "results.json")]
            code, printed = run([*line, "--page", str(folder / "page.md")])
        found = json.loads((folder / "results.json").read_text())["records"]
        return Start(code, printed, list(started), found, (folder / "page.md").read_text(), saved(), long())

    patch.setattr(sitting.Sitting, "_start", begin)
    patch.setattr(sitting, "PAUSE", 0.02)
    patch.setattr(sitting, "CHILD", [sys.executable, "-c", CHILD])
    patch.setenv("OMP_NUM_THREADS", "1")
    killed = start(SHORT, LONG, BROKEN, then=lambda process: process.kill())
    stopped = start(SHORT, LONG, then=lambda process: os.kill(os.getpid(), signal.SIGINT), after=killed.step)
    state = out / f"long/linear/linear/checkpoint-{stopped.step}/run.json"
    before = json.loads(state.read_text())
    state.write_text(json.dumps({**before, "record": {**before["record"], "seconds": HOUR}}))
    finished = start(replace(SHORT, given={**SMALL, "steps": 4}), LONG)
    patch.undo()
    return killed, stopped, finished


def run(line):
    """The exit code, and what was printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as caught:
        results.main(line)
    return caught.value.code, " ".join(said.getvalue().split())


def test_every_cell_runs_and_what_fails_is_recorded_with_its_reason(starts):
    killed, _, _ = starts
    assert killed.code == 1
    assert sorted(killed.started) == ["broken/linear", "long/linear", "short/softmax"]
    assert {name: record["status"] for name, record in killed.records.items()} == {
        "broken/linear": "failed", "long/linear": "failed", "short/softmax": "done",
    }  # fmt: skip
    assert killed.records["broken/linear"]["why"].startswith("cifar10 looks for the folder")
    assert killed.records["long/linear"]["why"] == "the process was ended by signal 9"
    assert "1 of 3 cells are done. The same command goes on with the rest." in killed.printed


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
    assert long["seconds"] > HOUR  # of all sittings


def test_the_page_is_made_from_the_records(starts):
    killed, stopped, finished = starts
    assert "| `linear` | failed: the process was ended by signal 9 |" in killed.page
    assert "1 of 2 trainings have been run." in stopped.page
    assert "2 of 2 trainings have been run." in finished.page
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


def shown(table, *rows):
    """The lines of the table with what is given for its cells."""
    every = [cell for row in table.rows() for cell in row.cells]
    saved = {cell.name: made(cell, **row) for cell, row in zip(every, rows, strict=False)}
    return page.section({"records": saved}).splitlines()


def test_the_best_comes_first_with_its_cost_beside_softmax(tables):
    tables(replace(SHORT, methods=("softmax", "linear", "local")))
    lines = shown(cells.TABLES[0], {}, {"step_seconds": 0.25, "peak_bytes": 2**29, "test": {"accuracy": 0.75, "loss": 1.0}})
    head = "| method | accuracy | loss | step time | of `softmax`'s time | peak memory | of `softmax`'s memory | parameters | minutes |"
    first = lines.index(head) + 2
    assert lines[first : first + 3] == [
        "| `linear` | 75.0% | 1 | 250 ms | 0.50 | 512 MiB | 0.50 | 1,000 | 1.5 |",
        "| `softmax` | 50.0% | 1.5 | 500 ms | 1.00 | 1 GiB | 1.00 | 1,000 | 1.5 |",
        "| `local` | not run yet |  |  |  |  |  |  |  |",
    ]
    assert "- Measured on: P, 2 cores, 1 thread, S, PyTorch 1, Python 3; 2 trainings side by side; commit abc1234." in lines


def test_what_cannot_do_the_task_is_there_with_the_reason(tables):
    tables(replace(LONG, task="recall", methods=(), given={"length": 64, "steps": 3}))
    lines = shown(cells.TABLES[0])
    for method in sq.methods():
        why = sq.why_not(configured(method, 64), is_causal=True, decode=True)
        assert any(line.startswith(f"| `{method}` | {'no: ' + why[0] if why else ''}") for line in lines), method


def test_seeds_give_a_range(tables):
    tables(replace(SHORT, seeds=(0, 1, 2), variants={"fp32": {}, "bf16": {"precision": "bf16"}}))
    lines = shown(cells.TABLES[0], *({"test": {"accuracy": a, "loss": 1.0}, "peak_bytes": 100} for a in (0.5, 0.6, 0.7, 0.8)))
    assert any(line.startswith("| `fp32` | 60.0% (50.0% to 70.0%) |") for line in lines)
    assert any(line.startswith("| `bf16` | 80.0% (80.0% to 80.0%, 1 of 3 seeds) |") for line in lines)
    assert [cell.settings.seed for cell in cells.TABLES[0].rows()[1].cells] == [0, 1, 2]


def test_a_projected_time_says_from_what(tables):
    tables(replace(SHORT, methods=("softmax", "linear"), projected=3000))
    lines = shown(cells.TABLES[0], {"step_seconds": 2.0}, {})
    assert "| `softmax` | 60 | 2 s | 1.00 | 100 min | 1 GiB | 1.00 | 1,000 | 1.5 |" in lines
    assert "| `linear` | 60 | 500 ms | 0.25 | 25 min | 1 GiB | 1.00 | 1,000 | 1.5 |" in lines


def test_reasons_do_not_break_the_table(tables):
    tables(SHORT)
    lines = shown(cells.TABLES[0], {"status": "diverged", "why": "the loss | is nan at step 3;\nmore in /some/where"})
    assert "| `softmax` | diverged: the loss \\| is nan at step 3 |  |  |  |  |  |  |  |" in lines


def test_a_record_of_other_settings_is_not_used(tables):
    tables(SHORT)
    [cell] = cells.selected(cells.TABLES, [])
    saved = {cell.name: made(cell)}
    assert records.of(cell, saved) == saved[cell.name]
    tables(replace(SHORT, given={**SHORT.given, "dim": 16}))
    [cell] = cells.selected(cells.TABLES, [])
    assert records.of(cell, saved) is None


@pytest.mark.parametrize("cell", cells.selected(cells.TABLES, []), ids=lambda cell: cell.name)
def test_the_command_of_a_cell_trains_what_is_declared(cell, monkeypatch):
    def train(task, methods, settings, out, *, precision, checkpointing, eval_every, save_every, eval_rows, threads, **_):
        given = {"precision": precision, "checkpointing": checkpointing, "eval_every": eval_every, "save_every": save_every}
        plan = Plan(task=place(task), settings=settings, threads=threads, eval_rows=eval_rows, **given)
        options = options_of(configured(methods[0], settings.length))
        assert {"settings": plan.identity(), "options": options} == cell.identity()
        assert (methods, threads) == ([cell.method], 1)
        return Results({}, {}, {})

    monkeypatch.setattr(training, "train", train)
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
    assert "1 of 4 cells are done; about 32 min left, 2 side by side." in printed  # (1.5 + 1.5 + 60) / 2
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--only", "cifar"], "got cifar"),
        (["--methods", "lin"], "got lin"),
        (["--jobs", "0"], "at least 1; got 0"),
        (["--minutes", "0"], "above 0; got 0.0"),
        (["--results", "/nowhere/results.json"], "directory that exists"),
    ],
)
def test_bad_arguments(line, said, capsys):
    with pytest.raises(SystemExit):
        results.main(line)
    assert said in capsys.readouterr().err


def test_tables_are_chosen_by_name_or_by_what_is_before_the_dash():
    options = results.parse(["--only", "recall, cifar10"])
    named = [t.name for t in cells.TABLES if any(results._is_named(t.name, word) for word in options.only)]
    assert named == ["cifar10", "recall-64", "recall-256"]


def test_a_file_of_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(SystemExit) as caught:
        results.main(["--list", "--results", str(tmp_path / "results.json")])
    assert caught.value.code == 2
    assert "must have schema 'subquad.results'" in capsys.readouterr().err
