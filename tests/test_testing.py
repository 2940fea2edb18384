"""`subquad.testing`: it finds what is wrong with a mechanism, says whose fault it is, and says what it needs."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

import subquad as sq
from subquad.testing import Case, MechanismContract, inputs
from subquad.testing.contract import Contract

ROOT = Path(__file__).parents[1]
WRONG = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
import subquad as sq
from subquad import reference
from subquad.testing import MechanismContract

FACTS = {"family": "exact", "engine": "dense", "idea": "an idea", "paper": "none", "time": "O(1)", "memory": "O(1)"}
REFUSES = dict.fromkeys(("cross", "decode", "attn_mask", "scale", "dropout_p", "enable_gqa", "key_padding_mask"), "not written yet")


@sq.register
@dataclass(frozen=True, kw_only=True)
class Leaky(sq.Mechanism):
    """A mean over the past and, from `first` on, over the future, too."""

    info: ClassVar = sq.Info(name="leaky", refuses=REFUSES, **FACTS)
    first: int = 10_000

    @staticmethod
    def reference(mechanism, query, key, value, *, allowed, **_):
        return allowed.to(value.dtype) @ value / allowed.sum(-1, keepdim=True)

    def run(self, call):
        n = call.query.shape[2]
        seen = torch.ones(1, 1, n, n, dtype=torch.bool)
        if call.is_causal:
            seen = seen.tril() | (torch.arange(n) >= self.first)
        return self.reference(self, call.query, call.key, call.value, allowed=seen), None


class TestLeaky(MechanismContract):
    mechanisms = (Leaky(), Leaky(first=64))
    sizes = (7, 65)
'''


def run(*arguments, cwd):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=cwd, timeout=300)


def test_a_leak_is_found_and_named(tmp_path):
    (tmp_path / "test_leaky.py").write_text(WRONG)
    chosen = "equals_reference or future"
    done = run(
        "-m", "pytest", "-q", "-rfs", "-p", "no:cacheprovider", "-c", os.devnull, "-k", chosen, "test_leaky.py", cwd=tmp_path
    )
    assert done.returncode == 1, done.stdout + done.stderr
    failed = {line.split("::")[-1].split(" - ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert "test_equals_reference[65-leaky-first=64]" in failed
    assert "test_removing_the_future_changes_nothing_before[leaky-first=64]" in failed
    assert all("leaky-first=64" in name for name in failed)  # the other options are right
    assert "test_equals_reference[7-leaky-first=64]" not in failed
    assert "the values differ: relative error" in done.stdout
    assert "leaky: cross-attention, M keys for N queries: not written yet" in done.stdout  # why a test was skipped


def test_without_pytest_it_says_what_to_install(tmp_path):
    done = run("-c", "import sys; sys.modules['pytest'] = None; import subquad, subquad.testing", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "subquad.errors.MissingExtraError: subquad.testing needs the extra subquad[test]; pytest is not installed. "
        "Install it: pip install pytest"
    )


def test_a_mechanism_without_a_reference_is_told_how_to_set_one():
    @dataclass(frozen=True, kw_only=True)
    class Mine(sq.Softmax):
        info: ClassVar[sq.Info] = replace(sq.Softmax.info, name="mine")

    with pytest.raises(sq.OptionError, match=r"it has none. Set the class variable Mine\.reference to a function"):
        Case(Mine()).reference(inputs(3))


def test_an_empty_list_of_mechanisms_is_refused():
    class Metafunc:
        fixturenames = ("case",)

    class Empty(MechanismContract):
        pass

    with pytest.raises(pytest.UsageError, match=r"Empty\.mechanisms must list the mechanisms to test; it is empty"):
        Empty().pytest_generate_tests(Metafunc())


def test_every_class_of_the_contract_is_part_of_it():
    assert set(Contract.__subclasses__()) == set(MechanismContract.__bases__)
