"""Parts *address*, *undefined* and *thread*: the calls of part *cases*, on compiled kernels that a sanitizer watches.

The kernels are compiled from csrc with the build's flags, a sanitizer and debugging symbols. The sanitizer ends the process at
its first report, so the case counts as a crash, and the report is in the worker's log. Only the kernels are instrumented, so
all reports are about them, and none is suppressed. For ThreadSanitizer, the kernels run on the threads of openmp.cpp, whose
synchronization it understands, and it ignores what PyTorch does (`ignore_noninstrumented_modules`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from subquad.ops import native_call, native_library
from tests.soak import cases, source
from tests.soak.drawing import draw
from tests.soak.shrinking import attempt

COUNT = 5000
SECONDS = 300
FOLDER, SANITIZER = "SOAK_KERNELS", "SOAK_SANITIZER"
HERE = Path(__file__).parent
OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_odr_violation=0"},
    "undefined": {"UBSAN_OPTIONS": "print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1:die_after_fork=0"},
}
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}

if folder := os.environ.get(FOLDER):
    native_library._FOLDER = Path(folder)
    if native_library.load() is None:
        raise RuntimeError(f"the kernels in {folder} cannot be loaded")
    if os.environ[SANITIZER] == "thread":
        native_call._ONE_THREAD_WORK = 0  # run short loops on several threads, too


def environment(part, out):
    """What a worker needs to run the kernels under the sanitizer `part`; compiles them first, if necessary."""
    runtime = subprocess.run([compiler(), f"-print-file-name={RUNTIMES[part]}"], capture_output=True, text=True, check=True)
    library = runtime.stdout.strip()
    if not Path(library).is_absolute():
        raise RuntimeError(f"{compiler()} has no {RUNTIMES[part]}: install the compiler's sanitizer libraries.")
    return {
        FOLDER: str(build(part, out)),
        SANITIZER: part,
        "LD_PRELOAD": library,
        **OPTIONS[part],
    }


def compiler():
    found = os.environ.get("CXX") or shutil.which("g++")
    if not found:
        raise RuntimeError("the sanitizers need g++; install it, or choose other parts.")
    return found


def build(part, out):
    """The folder with the kernels for this processor."""
    from hatch_build import ALWAYS, KINDS, SOURCES

    fingerprint = native_library._fingerprint(SOURCES)
    kind = native_library.kinds()[0]
    target = out / f"kernels-{part}-{fingerprint[:12]}" / f"kernels.{kind}.so"
    if target.exists():
        return target.parent
    target.parent.mkdir(parents=True, exist_ok=True)
    objects = Path(tempfile.mkdtemp(dir=target.parent))  # several processes may build at once
    sanitize = [f"-fsanitize={part}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1"]
    flags = next(kinds[kind] for kinds in KINDS.values() if kind in kinds)
    flags = [
        *(flag for flag in ALWAYS if flag not in ("-O3", "-shared")),
        "-fopenmp",
        *flags,
        *sanitize,
        f'-DSOURCES="{fingerprint}"',
        f"-I{SOURCES}",
    ]
    sources = sorted(SOURCES.rglob("*.cpp")) + ([HERE / "openmp.cpp"] if part == "thread" else [])

    def compiled(path):
        made = objects / f"{path.parent.name}-{path.stem}.o"
        run([compiler(), *flags, "-c", str(path), "-o", str(made)])
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compiled, sources))
    unfinished = objects / target.name
    openmp = [] if part == "thread" else ["-fopenmp"]
    run([compiler(), "-shared", f"-fsanitize={part}", *openmp, *made, "-o", str(unfinished)])
    os.replace(unfinished, target)
    shutil.rmtree(objects)
    return target.parent


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def drawn(seed, index):
    """The call of part *cases*, on the compiled kernels; for ThreadSanitizer, on several threads."""
    spec = replace(draw(seed, index), compiler=None, is_native=True)
    return replace(spec, threads=3) if os.environ.get(SANITIZER) == "thread" and spec.together is None else spec


def run_case(seed, index, folder):
    return cases.run(drawn(seed, index))


def explain(seed, index):
    return cases.explained(drawn(seed, index))


def shrink(seed, index, folder):
    """Shrink only what the sanitizer reports: part *cases* finds the same wrong results, and shrinks them faster."""
    spec = drawn(seed, index)
    if attempt(spec, cases.run)["verdict"] == "crash":
        return cases.shrunk_script(spec)
    return source.script(spec, "forward")
