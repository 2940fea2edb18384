"""Compile the kernels in csrc/ for each kind of processor. What does not compile is left out: subquad falls back to PyTorch."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path(__file__).parent / "csrc"
TARGET = Path(__file__).parent / "src/subquad/ops"
ALWAYS = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-shared", "-Wno-psabi"]
# Flags for several threads, in the order in which they are tried. Apple's compiler has no OpenMP runtime of its own: kernels
# use the one that PyTorch has loaded there, because a second one in the same process would abort it.
OPENMP = [["-fopenmp"], ["-Xclang", "-fopenmp", "-Wl,-undefined,dynamic_lookup"]]
# Compiler flags by kind of kernels; native_library.py says which of them a processor can run.
KINDS = {
    "x86_64": {
        "avx2": ["-mavx2", "-mfma", "-DWIDTH=32"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-DWIDTH=64"],
    },
    "aarch64": {"neon": ["-DWIDTH=16"]},
}
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # other names of the same, as on macOS


class CompileKernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        machine = platform.machine().lower()
        kinds = KINDS.get(MACHINES.get(machine, machine), {})
        if kinds and compiler() is None:
            self.app.display_warning("No C++ compiler found: subquad falls back to PyTorch, which is slower.")
            return
        built = [name for name, flags in kinds.items() if self.compile(name, flags)]
        if built:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"] += [f"/src/subquad/ops/kernels.{name}.so" for name in built]

    def compile(self, name: str, flags: list[str]) -> bool:
        target = TARGET / f"kernels.{name}.so"
        target.unlink(missing_ok=True)  # a stale library must not outlive a failed build
        unfinished = target.with_suffix(".part")
        sources = sorted(path for ending in ("*.cpp", "*.h") for path in SOURCES.rglob(ending))
        fingerprint = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()  # native_library.py checks it
        files = [str(path) for path in sources if path.suffix == ".cpp"]
        defines = [f'-DSOURCES="{fingerprint}"', f"-I{SOURCES}"]
        command = [*(compiler() or "c++").split(), *ALWAYS, *flags, *defines, *files, "-o", str(unfinished)]
        problems = []
        for openmp in [*(OPENMP if platform.system() == "Darwin" else OPENMP[:1]), []]:
            problem = run([*command, *openmp])
            if not problem:
                break
            problems.append(problem)
        else:
            failed = f"The {name} kernels of subquad could not be compiled; it falls back to PyTorch, which is slower."
            self.app.display_warning(f"{failed}\n{problems[-1]}")
            return False
        if not openmp:
            self.app.display_warning(
                f"The {name} kernels of subquad were compiled without OpenMP, so they use one thread only.\n{problems[0]}"
            )
        os.replace(unfinished, target)
        return True


def compiler() -> str | None:
    return os.environ.get("CXX") or next((c for c in ("g++", "clang++") if shutil.which(c)), None)


def run(command: list[str]) -> str:
    """What went wrong with a command; empty if nothing did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return (done.stderr or f"{command[0]} exited with code {done.returncode}") if done.returncode else ""
