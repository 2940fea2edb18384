"""hatch_build.py: which kernels are compiled for which machine, and what happens where something is missing."""

import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("hatchling")
import hatch_build


class Build:
    """A build of a wheel whose compiler understands no flag of `unknown`; it has a list of the commands and of the warnings."""

    def __init__(self, monkeypatch, folder, unknown=(), has_compiler=True):
        self.commands, self.warnings, self.unknown = [], [], unknown
        monkeypatch.setattr(hatch_build, "TARGET", folder)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(hatch_build.shutil, "which", lambda name: name if has_compiler else None)
        monkeypatch.setattr(hatch_build.subprocess, "run", self.compile)

    def compile(self, command, **_):
        self.commands.append(command)
        wrong = [flag for flag in command if flag in self.unknown]
        if not wrong:
            Path(command[command.index("-o") + 1]).write_text("a library")
        return subprocess.CompletedProcess(command, len(wrong), "", f"unsupported option {wrong[:1]}")

    def artifacts(self):
        hook = object.__new__(hatch_build.CompileKernels)
        names = {"app": SimpleNamespace(display_warning=self.warnings.append), "target_name": "wheel"}
        data = {"artifacts": []}
        hatch_build.CompileKernels.initialize(SimpleNamespace(**names, compile=lambda *x: self.one(hook, *x)), "standard", data)
        return [Path(name).name for name in data["artifacts"]]

    def one(self, hook, name, flags):
        return hatch_build.CompileKernels.compile(
            SimpleNamespace(app=SimpleNamespace(display_warning=self.warnings.append)), name, flags
        )


@pytest.mark.parametrize(
    ("system", "machine", "files"),
    [
        ("Linux", "x86_64", ["kernels.avx2.so", "kernels.avx512.so"]),
        ("Linux", "aarch64", ["kernels.neon.so"]),
        ("Darwin", "arm64", ["kernels.neon.so"]),
        ("Linux", "riscv64", []),
    ],
)
def test_kernels_by_machine(monkeypatch, tmp_path, system, machine, files):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "system", lambda: system)
    build = Build(monkeypatch, tmp_path)
    assert build.artifacts() == files
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert build.warnings == []
    assert all("-fopenmp" in command for command in build.commands)


def test_a_compiler_without_openmp(monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    build = Build(monkeypatch, tmp_path, unknown={"-fopenmp"})
    assert build.artifacts() == ["kernels.neon.so"]
    assert "-Xclang" in build.commands[1]  # Apple's way was tried, too
    assert "-fopenmp" not in build.commands[-1]
    [warning] = build.warnings
    assert "compiled without OpenMP, so they use one thread only" in warning


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    build = Build(monkeypatch, tmp_path, has_compiler=False)
    assert build.artifacts() == []
    assert build.warnings == ["No C++ compiler found: subquad falls back to PyTorch, which is slower."]


def test_sources_that_do_not_compile(monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    (tmp_path / "kernels.neon.so").write_text("of an earlier build")
    build = Build(monkeypatch, tmp_path, unknown={"-std=c++17"})
    assert build.artifacts() == []
    assert not list(tmp_path.iterdir())
    [warning] = build.warnings
    assert "could not be compiled; it falls back to PyTorch, which is slower" in warning
    assert "unsupported option" in warning
