"""The harness of the soak test: it finds every kind of fault, survives it, and resumes. And a short run of every part."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import subquad as sq
from tests.soak import NATIVE, PARTS, broken, cases, choices, drawing, faulty, native, progress, report, source
from tests.soak import __main__ as command
from tests.soak.calls import Prepared
from tests.soak.drawing import Spec
from tests.soak.evaluation import decided_by_rounding
from tests.soak.judging import RandomRounding, holds_as_a_whole
from tests.soak.run import Settings, run_one, run_part
from tests.soak.shrinking import shrunk

ROOT = Path(__file__).parents[2]
# How many cases of each part to run, and from which seed: at most about a minute each on one core.
SHORT = {"cases": 200, "kills": 1, "address": 30, "undefined": 30, "thread": 15}
SEED = 22
FAULTY = {"part": "cases", "seed": 3, "module": "tests.soak.faulty"}


def test_every_kind_of_end_is_found_and_survived_and_a_run_resumes(tmp_path):
    run_part(Settings(out=tmp_path, cases=2, workers=1, **FAULTY))
    saved = progress.load(tmp_path, "cases", 3)
    saved.add(7, {"verdict": "answered"}, 0.1)  # a worker was faster than the others
    progress.save(tmp_path, saved)
    seen = []
    found = run_part(Settings(out=tmp_path, cases=9, workers=2, **FAULTY), lambda p: seen.append(p.done))
    assert seen == [4, 5, 6, 7, 8, 9]  # neither 0 and 1 nor 7 again
    assert found.following == 9
    assert found.verdicts == {"answered": 4, "refused": 1, "wrong": 1, "foreign error": 1, "crash": 2}
    by_index = {finding["index"]: finding for finding in found.findings}
    assert set(by_index) == {2, 3, 4, 5}
    assert by_index[2]["reproduction"] == "small 2"
    assert "RuntimeError: an error of another library" in by_index[3]["error"]
    assert "code -11" in by_index[4]["error"]
    assert by_index[4]["labels"] == {"mechanism": "linear", "check": "process"}
    assert by_index[5]["error"] == "no end within 5 s"
    assert all(f["command"].endswith(f"--part cases --seed 3 --only {i}") for i, f in by_index.items())
    assert found.counts["stride"]["lazy"] == {"answered": 3, "refused": 1, "wrong": 1}
    kept = {path.name for path in (tmp_path / "cases-seed-3").iterdir() if path.is_dir()}
    assert kept == {"2", "4", "5"}  # of findings


def test_findings_are_retried_and_counted_once(tmp_path):
    first = run_part(Settings(out=tmp_path, cases=4, workers=1, **FAULTY))
    again = run_part(Settings(out=tmp_path, cases=4, workers=1, retries=True, **FAULTY))
    assert again.verdicts == first.verdicts
    assert [finding["index"] for finding in again.findings] == [2, 3]
    assert again.following == 4
    saved = progress.load(tmp_path, "cases", 3)
    saved.forget(saved.findings[0])
    assert saved.verdicts == {**first.verdicts, "wrong": 0}


def test_the_time_ends_a_run(tmp_path):
    found = run_part(Settings(out=tmp_path, cases=10**9, deadline=time.monotonic() - 1, **FAULTY))
    assert found.done == 0


def test_one_case_alone(tmp_path):
    settings = Settings(out=tmp_path, cases=1, **FAULTY)
    assert run_one(settings, faulty.WAYS.index("dies"))["verdict"] == "crash"
    assert not list(tmp_path.glob("*.json"))


def test_the_results_as_a_table_and_as_a_page(tmp_path):
    run_part(Settings(out=tmp_path, cases=4, workers=1, **FAULTY))
    results = report.write_results(tmp_path, 3)
    assert results == json.loads((tmp_path / "results.json").read_text())
    assert results["parts"]["cases"]["classes"] == {"foreign error": 1, "wrong, local": 1}
    assert report.has_findings(results)
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- soak:summary -->\nold\n<!-- soak:end -->\nb\n<!-- soak:cases -->\n<!-- soak:end -->\n<!-- soak:kills -->\n<!-- soak:end -->\n"
    )
    assert command.main(["--report", str(page), "--out", str(tmp_path)]) == 0
    text = page.read_text()
    assert "| Random calls | 4 | 1 | 1 | 1 | 1 | 0 | `python -m tests.soak --part cases --seed 3 --cases 4` |" in text
    assert "| lazy | 3 | 1 | 1 | 1 |" in text
    assert "old" not in text
    assert text.endswith(f"<!-- soak:kills -->\n{report.NOT_RUN}<!-- soak:end -->\n")
    assert report.rendered(text, json.loads(page.with_suffix(".json").read_text())) == text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["cases", "kills", "files", "address", "undefined", "thread"]),
        (["files,native", "cases"], ["files", "address", "undefined", "thread", "cases"]),
    ],
)
def test_parts_by_name(given, expected):
    assert command.chosen_parts(given) == expected


def test_an_unknown_part():
    done = subprocess.run([sys.executable, "-m", "tests.soak", "--part", "nothing"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "--part must be one of cases, kills" in done.stderr


@pytest.mark.parametrize("part", SHORT)
def test_a_short_run_finds_nothing(part, tmp_path, monkeypatch):
    if part in NATIVE:
        if not shutil.which("g++"):
            pytest.skip("the sanitizers need g++")
        build = native.build  # kept for the next time
        monkeypatch.setattr(native, "build", lambda part, out: build(part, ROOT / "soak-results"))
    found = run_part(Settings(part, SEED, tmp_path, SHORT[part]))
    assert not found.findings, json.dumps(found.findings, indent=1).replace("\\n", "\n")
    assert found.done == SHORT[part]
    assert found.verdicts["answered"]


def test_the_rule_for_a_result_as_a_whole():
    truth, plain = {"k": torch.zeros(2, 3, dtype=torch.float64)}, {"k": torch.tensor([[1.0, 0, 0], [0, 0, 0]])}
    evaluate = lambda dtype: truth if dtype == torch.float64 else plain
    assert holds_as_a_whole({"k": torch.full((2, 3), 1.9)}, evaluate, torch.float32)
    assert not holds_as_a_whole({"k": torch.full((2, 3), 2.1)}, evaluate, torch.float32)
    assert not holds_as_a_whole({"k": torch.full((2, 3), torch.nan)}, evaluate, torch.float32)


@pytest.mark.parametrize(("magnitude", "expected"), [(1.0, False), (1e20, True)])
def test_scores_that_rounding_decides(magnitude, expected):
    spec = replace(USUAL, mechanism="softmax", magnitudes={"q": 1.0, "k": magnitude, "v": 1.0})
    default = torch.get_default_dtype()
    try:
        assert decided_by_rounding(Prepared.of(spec)) is expected
    finally:
        torch.set_default_dtype(default)  # which `Prepared.of` has changed


def test_every_part_has_a_short_run():
    assert {*SHORT, "files"} == set(PARTS)  # files: see test_files.py


def test_the_page_shows_the_results_beside_it():
    page = ROOT / "docs" / "reliability.md"
    beside = page.with_suffix(".json")
    results = json.loads(beside.read_text()) if beside.exists() else {"parts": {}}
    assert report.rendered(page.read_text(), results) == page.read_text()
    assert all(f"<!-- soak:{part} -->" in page.read_text() for part in ("summary", *PARTS))


def test_a_case_is_a_function_of_seed_and_index():
    assert drawing.draw(1, 5) == drawing.draw(1, 5)
    assert len({repr(drawing.draw(seed, index)) for seed in range(3) for index in range(20)}) == 60


@pytest.fixture
def broken_mechanisms(monkeypatch):
    from subquad import registry

    monkeypatch.setattr(registry, "_DEFAULTS", dict(registry._DEFAULTS))
    for mechanism in broken.MECHANISMS:
        registry.register(mechanism)


USUAL = Spec("", batch=2, heads=2, kv_heads=2, queries=9, keys=9, value_dim=3)


@pytest.mark.parametrize(
    ("mechanism", "spec", "verdict", "check"),
    [
        ("right_mean", USUAL, "answered", None),
        ("right_mean", replace(USUAL, grad=("q", "v")), "answered", None),
        ("right_mean", replace(USUAL, is_causal=True), "refused", None),
        ("right_mean", replace(USUAL, dtype="bfloat16", weights="float32"), "answered", None),
        ("wrong_mean", USUAL, "wrong", "forward"),
        ("wrong_gradient", replace(USUAL, grad=("v",)), "wrong", "gradients"),
        ("wrong_gradient", USUAL, "answered", None),
        ("rounded_mean", replace(USUAL, dtype="float32", weights="float32"), "wrong", "forward"),
        ("hidden_nan", replace(USUAL, has_nan_query=True), "wrong", "NaN"),
        ("needless_refusal", USUAL, "wrong", "refusal"),
        ("broken_promise", replace(USUAL, is_causal=True), "wrong", "accepted"),
        ("foreign_error", USUAL, "foreign error", "ZeroDivisionError"),
        ("unsteady_mean", replace(USUAL, together="threads"), "wrong", "threads"),
        ("unsteady_mean", replace(USUAL, together="fork"), "wrong", "fork"),
    ],
)
def test_a_broken_mechanism_is_found(mechanism, spec, verdict, check, broken_mechanisms):
    result = cases.run(replace(spec, mechanism=mechanism))
    assert result["verdict"] == verdict, result.get("error")
    assert result["labels"].get("check") == check


def test_a_finding_becomes_small_and_its_script_shows_it(broken_mechanisms, tmp_path):
    spec = replace(
        USUAL,
        mechanism="wrong_mean",
        dtype="float32",
        weights="float32",
        padding="left",
        strides={"k": ("sliced", 2)},
        grad=("k",),
    )
    small, result = shrunk(spec, cases.run)
    assert (small.batch, small.heads, small.dim, small.value_dim, small.padding, small.strides) == (1, 1, 1, 1, None, {})
    assert result["labels"]["check"] == "forward"
    done = subprocess.run([sys.executable, "-c", source.script(small, "forward")], capture_output=True, text=True, cwd=ROOT)
    found, _, largest = done.stdout.split()
    assert float(found) > 0.1 * float(largest), done.stderr


def test_a_crash_becomes_small(broken_mechanisms):
    small, result = shrunk(replace(USUAL, mechanism="crash"), cases.run)
    assert result["verdict"] == "crash"
    assert small.queries == 0


def test_a_choice_within_rounding_is_a_hash_flip_and_another_is_not():
    """Two centroids at the same distance but for rounding: a token may go to either."""
    mechanism = sq.Routing(clusters=2)
    q = torch.tensor([[[[1.0, 0.0], [1.0, 1.0]]]], dtype=torch.float64)
    for margin, expected in ((1e-9, True), (1e-3, False)):
        centroids = torch.tensor([[[1.0, 0.0], [1.0 - margin, margin / 3]]], dtype=torch.float64)
        q[..., 1, :] = torch.tensor([1.0, 0.5])
        close = choices.undecided(mechanism, q, q, None, {"centroids": centroids}, 1e-7)
        assert close.tolist() == [[expected]]


def test_random_rounding_is_of_the_size_of_rounding():
    x = torch.randn(1000, dtype=torch.float64)
    errors = [((x * 3).sub(run_rounded(x, seed)).abs() / (x * 3).abs()).max() for seed in range(4)]
    assert all(0.9 < error / torch.finfo(torch.float64).eps < 1.6 for error in errors)


def run_rounded(x, seed):
    with RandomRounding(seed, units=1):
        return x * 3


FAULTS = {
    "address": ("tokens=8", "AddressSanitizer: heap-buffer-overflow"),
    "undefined": ("misaligned=1", "runtime error: .*misaligned"),
    "thread": ("at_once=2", "ThreadSanitizer: data race"),
}
CALL = """
import sys, threading
import torch
from subquad.ops import convolution, native_call
from tests.soak import native  # loads the kernels under the sanitizer

settings = dict([sys.argv[1].split("=")])
value, base, kernel = torch.ones(1, 1, 4, 16), torch.zeros(1, 1, 4, 16), torch.ones(1, 3)
out = torch.zeros_like(base)
sizes = dict(zip(convolution._SIZES, (1, 1, 1, int(settings.get("tokens", 4)), 16, 3)))
arguments = convolution._Call(**sizes, threads=1)
for name, x in {"value": value, "base": base, "out": out}.items():
    setattr(arguments, name, native_call.View(x.data_ptr() + int(settings.get("misaligned", 0)), *x.stride()[:3]))
arguments.kernel = kernel.data_ptr()


def work():
    for _ in range(1000):
        native_call.native_library.load().subquad_convolution_forward_float32(native_call.ctypes.byref(arguments))


threads = [threading.Thread(target=work) for _ in range(int(settings.get("at_once", 1)))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("part", NATIVE)
def test_a_sanitizer_reports_a_fault_of_a_kernel(part, tmp_path):
    """A length beyond the tensor, an address between two numbers, two threads that write one result."""
    if not shutil.which("g++"):
        pytest.skip("the sanitizers need g++")
    setting, report_ = FAULTS[part]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **native.environment(part, ROOT / "soak-results")}
    done = subprocess.run([sys.executable, "-c", CALL, setting], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode
    assert re.search(report_, done.stderr), done.stderr[-2000:]
    assert "csrc/" in done.stderr  # where in our code
