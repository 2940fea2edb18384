"""Which library of compiled kernels is loaded: for this processor, from these sources, with these structures; otherwise why not."""

import ctypes
import platform
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad.ops import dispatch, native_call, native_library
from tests.engines.test_native import needs_compiled

load = native_library.load.__wrapped__
COMPILED = native_library.search().path  # the library of this processor


@pytest.fixture
def processor(monkeypatch):
    def become(machine, capability):
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    return become


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty folder for libraries."""
    monkeypatch.setattr(native_library, "_FOLDER", tmp_path)
    native_library._reason.cache_clear()
    yield tmp_path
    native_library._reason.cache_clear()


@pytest.mark.parametrize(
    ("machine", "capability", "kinds"),
    [
        ("x86_64", "AVX512", ("avx512", "avx2")),
        ("x86_64", "AVX2", ("avx2",)),
        ("AMD64", "AVX2", ("avx2",)),
        ("x86_64", "DEFAULT", ()),
        ("arm64", "DEFAULT", ("neon",)),  # macOS
        ("aarch64", "DEFAULT", ("neon",)),
        ("aarch64", "SVE256", ("neon",)),
        ("aarch64", "SVE128", ("neon",)),
        ("riscv64", "DEFAULT", ()),
    ],
)
def test_kinds_of_kernels(processor, machine, capability, kinds):
    processor(machine, capability)
    assert native_library.kinds() == kinds


@needs_compiled
@pytest.mark.parametrize(
    ("machine", "capability", "name"),
    [("x86_64", "AVX512", "avx2"), ("arm64", "DEFAULT", "neon"), ("aarch64", "SVE256", "neon")],
)
def test_the_kernels_that_were_compiled_are_found(processor, folder, machine, capability, name):
    """Any library stands for those that this machine cannot run."""
    shutil.copy(COMPILED, folder / f"kernels.{name}.so")
    processor(machine, capability)
    found = native_library.search()
    assert found.path == folder / f"kernels.{name}.so"
    assert found.problems == ()


def test_without_any_there_is_a_reason_and_no_warning(processor, folder):
    processor("aarch64", "SVE256")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load() is None
    assert native_library._reason() == (
        "there are no compiled kernels for this processor (aarch64, SVE256); compile them: pip install --editable ."
    )
    native_library._reason.cache_clear()
    processor("riscv64", "DEFAULT")
    assert native_library._reason() == "subquad has no compiled kernels for this processor (riscv64, DEFAULT)"


def assert_not_used(rule, monkeypatch):
    """One warning, a reason, and everything still works."""
    with pytest.warns(UserWarning, match=rule) as warned:
        library = load()
    assert len(warned) == 1
    assert "so subquad falls back to PyTorch, which is slower. Compile it again" in str(warned[0].message)
    assert library is None
    monkeypatch.setattr(native_library, "load", lambda: None)
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind(0)
    with dispatch.recorded() as choices:
        assert sq.attention(q, k, v, "linear").isfinite().all()
    assert re.search(rule, choices[0].reasons[0])


def test_a_file_that_is_no_library(processor, folder, monkeypatch):
    processor("x86_64", "AVX2")
    (folder / "kernels.avx2.so").write_text("not a library")
    assert_not_used(r"kernels\.avx2\.so cannot be loaded \(", monkeypatch)


def test_a_library_of_something_else(processor, folder, monkeypatch):
    other = [path for path in Path(torch.__file__).parent.glob("lib/lib*.so") if path.stat().st_size < 2**20]
    if not other:
        pytest.skip("PyTorch has no small shared library here")
    processor("x86_64", "AVX2")
    shutil.copy(other[0], folder / "kernels.avx2.so")
    assert_not_used(r"kernels\.avx2\.so (cannot be loaded|is not a library of these kernels) \(", monkeypatch)


@needs_compiled
@pytest.mark.parametrize("change", ["order", "type", "one more", "one less"])
def test_a_library_whose_structures_are_others(folder, monkeypatch, change):
    fields = list(native_call.View._fields_)
    if change == "order":
        fields[1:3] = reversed(fields[1:3])
    elif change == "type":
        fields[3] = ("token", ctypes.c_int32)
    elif change == "one more":
        fields.append(("more", ctypes.c_int64))
    else:
        fields.pop()
    view = type("View", (ctypes.Structure,), {"_fields_": fields})
    monkeypatch.setitem(native_library._MIRRORED, "View", view)
    shutil.copy(COMPILED, folder)
    assert_not_used(r"has another layout of the structure View: (head|token|more|its size) differs", monkeypatch)


@needs_compiled
def test_a_library_that_cannot_be_used_leaves_the_next_one(processor, folder):
    processor("x86_64", "AVX512")
    (folder / "kernels.avx512.so").write_text("not a library")
    shutil.copy(COMPILED, folder / "kernels.avx2.so")
    with pytest.warns(UserWarning, match=r"kernels\.avx512\.so cannot be loaded .*, so subquad uses kernels\.avx2\.so"):
        assert load() is not None


def test_a_structure_is_mirrored_once():
    with pytest.raises(ValueError, match="two classes mirror the C structure View"):
        native_call.structure("View", ("data",), (), (), ())


@pytest.mark.skipif(not native_library._SOURCES.is_dir(), reason="the sources are not here")
def test_every_structure_of_a_call_is_compared():
    text = "".join(path.read_text() for path in sorted(native_library._SOURCES.rglob("*.cpp")))
    exported = set(re.findall(r"^LAYOUT\((\w+),", text, flags=re.MULTILINE))
    assert exported == set(native_library._MIRRORED)
    assert set(re.findall(r"^EXPORT\(\w+, (\w+)\)", text, flags=re.MULTILINE)) <= exported
