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
ALWAYS = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi"]
# Compiler flags by CPU capability, as torch.backends.cpu.get_cpu_capability names it.
KINDS = {
    "x86_64": {
        "avx2": ["-mavx2", "-mfma", "-DWIDTH=32"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-DWIDTH=64"],
    },
    "aarch64": {"default": ["-DWIDTH=16"]},
}


class CompileKernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        built = [name for name, flags in KINDS.get(platform.machine(), {}).items() if self.compile(name, flags)]
        if built:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"] += [f"/src/subquad/ops/kernels.{name}.so" for name in built]

    def compile(self, name: str, flags: list[str]) -> bool:
        compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++") if shutil.which(c)), None)
        target = TARGET / f"kernels.{name}.so"
        if compiler is None:
            self.app.display_warning("No C++ compiler found: subquad falls back to PyTorch, which is slower.")
            return False
        target.unlink(missing_ok=True)  # a stale library must not outlive a failed build
        unfinished = target.with_suffix(".part")
        sources = sorted(path for ending in ("*.cpp", "*.h") for path in SOURCES.rglob(ending))
        fingerprint = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()  # native_library.py checks it
        files = [str(path) for path in sources if path.suffix == ".cpp"]
        defines = [f'-DSOURCES="{fingerprint}"', f"-I{SOURCES}"]
        command = [*compiler.split(), *ALWAYS, *flags, *defines, *files, "-o", str(unfinished)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            problem = (done.stderr or f"{compiler} exited with code {done.returncode}") if done.returncode else ""
        except OSError as error:
            problem = str(error)
        if problem:
            self.app.display_warning(
                f"The {name} kernels of subquad could not be compiled; it falls back to PyTorch, which is slower.\n{problem}"
            )
            return False
        os.replace(unfinished, target)
        return True
