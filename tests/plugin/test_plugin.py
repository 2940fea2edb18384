"""A mechanism of an installed package works wherever a built-in one does."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package in it, installed by pip as any other; nothing is downloaded."""
    source = shutil.copytree(HERE / "package", tmp_path_factory.mktemp("package") / "source")
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    done = subprocess.run([*command, "--target", target, source], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def run(installed):
    """What a Python process prints that finds the installed package."""

    def start(*arguments, cwd=ROOT):
        path = os.pathsep.join([str(installed), str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return start


def test_function_layer_models_conversion_list_and_show(run, tmp_path):
    printed = run(HERE / "use.py", tmp_path)
    assert "relu(x)^2 as the feature map" in printed
    assert "squared_relu" in printed
    run(HERE / "use.py", "load", tmp_path)


def test_the_code_of_its_page(run):
    page = (ROOT / "docs" / "custom-mechanisms.md").read_text()
    [block] = re.findall(r"```python\n(import torch\n.*?)```", page, flags=re.DOTALL)
    run("-c", f"{block}assert out.shape == (1, 2, 64, 16)")


def test_compare(run, tmp_path):
    options = ["--methods", "squared_relu", "--lengths", "16,32", "--heads", "2", "--head-dim", "8", "--budget", "1"]
    printed = run("-m", "subquad", "compare", *options, "--out", "here", cwd=tmp_path)
    assert "squared_relu" in printed
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    measured = {t["kind"] for t in results["timings"] if t["method"] == "squared_relu" and t["rounds"]}
    assert measured == {"forward", "training", "decode"}


def test_train(run, tmp_path):
    options = ["--layers", "1", "--dim", "8", "--heads", "2", "--steps", "3", "--batch", "8", "--threads", "1"]
    printed = run("-m", "subquad", "train", "digits", "--method", "squared_relu", *options, "--out", "here", cwd=tmp_path)
    assert "squared_relu" in printed
    [record] = json.loads((tmp_path / "here" / "results.json").read_text())["records"]
    assert (record["method"], record["status"], record["step"]) == ("squared_relu", "done", 3)


def test_contract(run):
    printed = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", HERE, HERE / "package" / "tests"
    )
    assert "passed" in printed
    assert "failed" not in printed
