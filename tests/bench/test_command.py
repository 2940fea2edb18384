"""`subquad compare` and `subquad advise` from the command line."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from subquad.bench import load

pytestmark = pytest.mark.slow

TINY = [
    "--methods",
    "linear,local",
    "--lengths",
    "64:128",
    "--heads",
    "2",
    "--head-dim",
    "16",
    "--threads",
    "1",
    "--budget",
    "0.5",
]


def subquad(*arguments, cwd, **options):
    environment = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    code = "from subquad.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, **options)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    return folder, subquad("compare", *TINY, cwd=folder)


def test_compare_writes_results_and_page_and_prints_tables(compared):
    folder, done = compared
    assert done.returncode == 0, done.stderr
    assert "Speedup over SDPA, forward pass" in done.stdout
    assert "Speedup over SDPA, decoding one token" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    results = load(folder / "subquad-compare" / "results.json")
    assert results.finished
    assert results.command.startswith("subquad compare --methods linear,local")
    page = (folder / "subquad-compare" / "report.html").read_text()
    assert "<html" in page
    assert "linear" in page


def test_plots_as_files(compared):
    folder, _ = compared
    done = subquad("compare", *TINY, "--png", cwd=folder)  # nothing is measured again
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (folder / "subquad-compare").iterdir()}
    assert {"time_forward.png", "time_forward.svg", "memory.png"} <= names


def test_advise_from_the_last_comparison_here(compared):
    folder, _ = compared
    done = subquad("advise", "--length", "128", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    for record in json.loads(done.stdout):
        assert record["method"] in ("linear", "local", "softmax")
        assert record["reasons"]
        assert record["code"].startswith("sq.")
    assert "sq.attention" in subquad("advise", "--length", "128", cwd=folder).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "linaer"], "no method is called 'linaer'"),
        (["--lengths", "64:32"], "--lengths first:last must have 1 <= first <= last"),
        (["--lengths", "a,b"], "--lengths must be first:last, doubling each time"),
        (["--lengths", "0,64"], "a length must be an integer of tokens from 1"),
        (["--budget", "0"], "the budget must be above 0 minutes; got 0"),
        (["--dtype", "int8"], "dtype must be float32"),
        (["--device", "cuda:77"], "device 'cuda:77' cannot be used here"),
        (["--device", "toaster"], "device 'toaster' cannot be used here"),
        (["--out", "/dev/null/results"], "cannot be written"),
        (["--qkv", "nothing.pt"], "cannot be read as saved tensors"),
    ],
)
def test_bad_input_is_one_message_and_code_2(tmp_path, arguments, said):
    done = subquad("compare", *TINY, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_broken_results_file_is_refused_and_kept(tmp_path):
    (tmp_path / "subquad-compare").mkdir()
    path = tmp_path / "subquad-compare" / "results.json"
    path.write_text('{"schema": "subquad.com')
    done = subquad("compare", *TINY, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not valid JSON" in " ".join(done.stderr.split())
    assert path.read_text() == '{"schema": "subquad.com'
    assert subquad("compare", *TINY, "--fresh", cwd=tmp_path).returncode == 0


def test_ctrl_c_keeps_and_reports_what_is_done(tmp_path):
    # Whoever is started in the background ignores SIGINT, and so would what it starts.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from subquad.cli import main; main()"
    command = [sys.executable, "-c", code, "compare", *TINY, "--lengths", "64:4096", "--budget", "5"]
    environment = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    )
    path = tmp_path / "subquad-compare" / "results.json"
    begun = time.monotonic()
    while time.monotonic() - begun < 120 and not (path.exists() and any(t.rounds for t in load(path).timings)):
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Stopped. All measurements are kept" in " ".join(err.split())
    assert "Speedup over SDPA" in out
    assert not load(path).finished
    assert (path.parent / "report.html").exists()
