"""What the README says is so: its code runs, its tables come from the records and the measurements."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from benchmarks import docs

import subquad as sq
from subquad import models
from subquad.bench import analysis, load
from subquad.cli import app
from subquad.models.configuration import POSITIONS
from subquad.report import figures
from subquad.training import train

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
CONVERTING = (ROOT / "docs" / "converting.md").read_text()


def ran(page, least):
    """The names that a page's blocks of Python leave, run one after the other."""
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) >= least
    for block in blocks:
        exec(compile(block, "a page", "exec"), names)
    return names


def test_the_code_runs():
    assert ran(README, 5)["state"].length == 302


def test_the_code_about_models_runs():
    assert ran(MODELS, 5)["classifier"].config.num_labels == 3


def test_the_code_about_converting_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ran(CONVERTING, 3)
    assert names["progress"].ended
    assert (tmp_path / "checkpoints" / "lora.pt").exists()


def test_a_task_of_ones_own_is_trained(tmp_path):
    [block] = re.findall(r"```python\n([^`]*class Parity.*?)```", (ROOT / "docs/training.md").read_text(), flags=re.DOTALL)
    names = {"__name__": "mine"}
    exec(block, names)
    task = names["Parity"]()
    settings = replace(task.info.defaults, layers=1, steps=5)
    [record] = train(task, ["linear"], settings, tmp_path, threads=1, in_worker=False).records
    assert record.status == "done"
    assert 0 < record.test["accuracy"] < 1


def test_the_mechanism_of_the_page_is_the_one_that_is_installed_and_tested():
    """tests/plugin installs the package, and runs the page's other code and the contract on it."""
    page, package = (ROOT / "docs" / "custom-mechanisms.md").read_text(), ROOT / "tests" / "plugin" / "package"
    shown = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)```", page, flags=re.DOTALL | re.MULTILINE))
    assert shown == {
        name: (package / name).read_text() for name in ("squared_relu.py", "pyproject.toml", "tests/test_squared_relu.py")
    }


@pytest.mark.parametrize("name", [name for name in models.__all__ if name.startswith("SubquadFor")])
def test_every_model_is_in_the_table(name):
    assert f"| `{name}` |" in MODELS


def test_every_position_is_in_the_table():
    shown = re.search(r"## Positions.*?(?=## )", MODELS, flags=re.DOTALL)[0]
    assert all(f'| `"{position}"`' in shown for position in POSITIONS)


@pytest.mark.parametrize("command", ["convert", "generate"])
def test_every_option_of_conversions_is_told(command):
    parameters = typer.main.get_command(app).commands[command].params
    told = set(re.findall(r"`(--[a-z-]+)", README + CONVERTING)) | {"--help", "--max-new-tokens"}
    assert {option for parameter in parameters for option in parameter.opts if option.startswith("--")} <= told


def test_the_refusal_is_the_one_shown():
    shown = re.search(r">>> (.*?)\nsubquad\.errors\.(\w+): (.*?)```", README, flags=re.DOTALL)
    q = k = v = torch.randn(1, 8, 4096, 64)
    with pytest.raises(sq.SubquadError) as caught:
        eval(shown[1], {"sq": sq, "torch": torch, "q": q, "k": k, "v": v})
    assert type(caught.value).__name__ == shown[2]
    assert str(caught.value) == shown[3].strip()


def capability_row(name):
    info = sq.info(name)
    needs = ["is_causal", "cross", "key_padding_mask", "enable_gqa"]
    marks = [
        "no" if need not in info.supports else "with options" if sq.why_not(name, **{need: True}) else "yes" for need in needs
    ]
    function = "yes" if "functional" in info.supports else "no: it has parameters"
    also = ", ".join(need for need in ("attn_mask", "scale", "dropout_p", "global_mask") if need in info.supports) or "-"
    return " | ".join([f"| `{name}`", info.idea, *marks, info.state or "no", function, also]) + " |"


@pytest.mark.parametrize("name", sq.methods())
def test_the_table_is_the_records(name):
    assert capability_row(name) in README


def measured_rows():
    """Forward, then causal forward, then training: forward and backward."""
    results = json.loads((ROOT / "benchmarks" / "engines.json").read_text())
    ratio = {(r["method"], r["is_causal"], r["pass"], r["length"]): f"{r['times_sdpa']:.1f}" for r in results["time"]}
    kinds = [
        (False, "forward", (1024, 2048, 4096, 16384)),
        (True, "forward", (4096, 16384)),
        (False, "training", (4096, 16384)),
    ]
    for method in dict.fromkeys(r["method"] for r in results["time"] if r["method"] != "sdpa"):
        cells = [ratio.get((method, is_causal, which, n), "-") for is_causal, which, lengths in kinds for n in lengths]
        yield " | ".join([f"| `{method}`", *cells]) + " |"


def test_the_figures_are_the_measured_ones():
    shown = re.search(r"engines\.json -->\n(.*?)<!-- end -->", README, flags=re.DOTALL)[1].strip().splitlines()[2:]
    assert shown == list(measured_rows())


def compare_rows():
    """From which length it pays, and the gain, time's growth and the error at the longest."""
    results = load(ROOT / "docs" / "compare" / "results.json")
    longest = max(results.lengths)
    for method in results.methods:
        starts = [analysis.time_crossover(results, method, kind) for kind in ("forward", "training")]
        gain = analysis.ratio(results, method, longest, "forward")
        growth = analysis.time_growth(results, method, "forward")
        error = max((f.length, f.errors["random"]) for f in results.facts if f.method == method)[1]
        cells = [*map(start_cell, starts), figures.against(gain), f"N^{growth:.2f}", f"{error:.2f}"]
        yield " | ".join([f"| `{method}`", *cells]) + " |"


def start_cell(start):
    if start is None:
        return "-"
    text = f"at most {start.length:,.0f}" if start.at_most else analysis.rounded(start.length)
    return text if start.is_certain else f"{text}?"


def test_the_comparison_is_the_measured_one():
    shown = re.search(r"compare/results\.json -->\n(.*?)<!-- end -->", README, flags=re.DOTALL)[1].strip().splitlines()[2:]
    assert shown == list(compare_rows())
    results = load(ROOT / "docs" / "compare" / "results.json")
    assert f"`{results.command.replace(' --out docs/compare', '')}`" in " ".join(README.split())
    assert analysis.headline(results) in " ".join(README.split())


def decode_rows():
    """Tokens per second, then the size of the cache, by position."""
    cells = json.loads((ROOT / "benchmarks" / "decode.json").read_text())["cells"]
    by = {(c["method"], c["position"]): c for c in cells}
    positions = (1024, 8192, 65536)
    for method in dict.fromkeys(c["method"] for c in cells):
        speed = [f"{by[method, p]['tokens_per_second']:.0f}" for p in positions]
        size = [f"{by[method, p]['cache_bytes'] / 2**20:.1f}" for p in positions]
        yield " | ".join([f"| `{method}`", *speed, *size]) + " |"


def test_the_decoding_figures_are_the_measured_ones():
    shown = re.search(r"decode\.json -->\n(.*?)<!-- end -->", README, flags=re.DOTALL)[1].strip().splitlines()[2:]
    assert shown == list(decode_rows())


def stream_sentence():
    stream = json.loads((ROOT / "benchmarks" / "decode.json").read_text())["stream"]
    first, last = (stream[f"milliseconds_{tenth}_tenth"] for tenth in ("first", "last"))
    grown = stream["process_bytes_growth_since"] / 2**20
    return (
        f"Generating {stream['asked']:,} tokens in one call with `{stream['method']}` took {first:.1f} ms per token in the first "
        f"tenth and {last:.1f} ms in the last; after the first tenth the process grew by {grown:.1f} MiB"
    )


def test_stream_figures():
    assert stream_sentence() in " ".join(README.split())


def growth_sentence():
    rows = [r for r in json.loads((ROOT / "benchmarks" / "engines.json").read_text())["growth"] if r["is_linear"]]
    time, memory = (max(r[f"{kind}_slope"] for r in rows) for kind in ("time", "memory"))
    return f"time grows with an exponent of at most {time:.2f} and memory with at most {memory:.2f}"


def test_growth_figures():
    assert growth_sentence() in " ".join(README.split())


def test_memory_figures():
    results = json.loads((ROOT / "benchmarks" / "engines.json").read_text())
    multiples = [row["peak_over_inputs_and_output"] for row in results["memory"]]
    assert f"at most {max(multiples):.2f} of inputs and output together" in " ".join(README.split())


@pytest.mark.parametrize("page", docs.SECTIONS, ids=lambda page: page.name)
def test_the_figures_of_pages_are_the_measured_ones(page):
    assert page.read_text() == docs.filled(page, docs.SECTIONS[page])


def test_the_changelog_has_this_version():
    assert f"## {sq.__version__}" in (ROOT / "CHANGELOG.md").read_text()
