"""Compiles the loops in engines/native, for each kind of processor; what does not compile is left out."""

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

FOLDER = Path(__file__).parent / "src/subquad/engines/native"
ALWAYS = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi"]
# By torch's name for what a processor has.
KINDS = {
    "x86_64": {
        "avx2": ["-mavx2", "-mfma", "-DWIDTH=32"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-DWIDTH=64"],
    },
    "aarch64": {"default": ["-DWIDTH=16"]},
}


class Loops(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        built = [name for name, flags in KINDS.get(platform.machine(), {}).items() if self.compile(name, flags)]
        if built:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"] += [f"/src/subquad/engines/native/loops.{name}.so" for name in built]

    def compile(self, name: str, flags: list[str]) -> bool:
        compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++") if shutil.which(c)), None)
        target = FOLDER / f"loops.{name}.so"
        if compiler is None:
            self.app.display_warning("No C++ compiler: subquad runs on PyTorch alone, which is slower.")
            return False
        target.unlink(missing_ok=True)  # what does not compile now is not to be found, either
        unfinished = target.with_suffix(".part")
        sources = sorted(path for ending in ("*.cpp", "*.h") for path in FOLDER.glob(ending))
        fingerprint = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()  # native.library asks for it
        files = [str(path) for path in sources if path.suffix == ".cpp"]
        command = [*compiler.split(), *ALWAYS, *flags, f'-DSOURCES="{fingerprint}"', *files, "-o", str(unfinished)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            problem = (done.stderr or f"{compiler} ended with code {done.returncode}") if done.returncode else ""
        except OSError as error:
            problem = str(error)
        if problem:
            self.app.display_warning(f"subquad's loops for {name} could not be compiled; PyTorch does their work.\n{problem}")
            return False
        os.replace(unfinished, target)
        return True
