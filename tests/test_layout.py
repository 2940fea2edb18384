"""The shape of the package: what it exports, what imports what, and that importing it loads little and changes nothing."""

import ast
import re
import subprocess
import sys
from inspect import getfile
from pathlib import Path

import pytest

import subquad as sq
from subquad.mechanisms import MECHANISMS

ROOT = Path(sq.__file__).parent
# A module may import from the rooms before its own, and from its own; in function bodies too.
ROOMS = [
    {"errors", "growing_tensor", "masks", "rotary", "state", "runs"},
    {"ops"},
    {"engines"},
    {"families"},
    {"mechanisms"},
    {"registry", "checks"},
    {"attention"},
    {"layer", "backend"},
    {"models"},
    {"distributed"},
    {"bench", "tasks"},
    {"training", "conversion"},
    {"report"},
    {"cli", "__main__"},
]
WITH_REFERENCE = {"bench", "testing"}  # may import the reference, too
TESTING = "layer"  # testing imports from the rooms up to this one, and no room imports it


def imports(path):
    """The rooms of subquad that a file imports from, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            parts = node.module.split(".")
            if parts[0] == "subquad":
                yield from parts[1:2] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from _rooms(alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from _rooms(argument.value for argument in node.args if isinstance(argument, ast.Constant))


def _rooms(names):
    return [name.partition(".")[2].partition(".")[0] for name in names if name.partition(".")[0] == "subquad"]


def room_of(name):
    return next((i for i, room in enumerate(ROOMS) if name in room), None)


def modules():
    return [p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.name != "__init__.py"]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if own == "reference":
        assert set(imports(path)) <= {"reference"}
        return
    last = room_of(TESTING if own == "testing" else own)
    assert last is not None, f"{own!r} has no place in the order of imports"
    for name in imports(path):
        if name == "reference":
            assert own in WITH_REFERENCE
        elif name != own:
            assert room_of(name) is not None, f"{name!r} is no room: import from the module that defines it"
            assert room_of(name) <= last, f"{own} stands before {name}"


def test_training_and_conversion_do_not_import_each_other():
    assert not {"training", "bench"} & {name for path in (ROOT / "conversion").rglob("*.py") for name in imports(path)}
    assert "conversion" not in {name for path in (ROOT / "training").rglob("*.py") for name in imports(path)}


@pytest.mark.parametrize("line", ["import subquad.cli", "from subquad import cli", "from subquad.cli.main import app"])
@pytest.mark.parametrize("template", ["{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_an_import_is_seen_wherever_it_stands(tmp_path, line, template):
    (tmp_path / "module.py").write_text(template.format(line))
    assert list(imports(tmp_path / "module.py")) == ["cli"]


def test_an_import_by_name_is_seen(tmp_path):
    (tmp_path / "module.py").write_text("import importlib\nimportlib.import_module('subquad.cli.main')")
    assert list(imports(tmp_path / "module.py")) == ["cli"]


def test_mechanisms_holds_mechanisms_only():
    files = {path.stem for path in (ROOT / "mechanisms").iterdir() if path.suffix == ".py"} - {"__init__"}
    assert files == {mechanism.info.name for mechanism in MECHANISMS}
    for mechanism in MECHANISMS:
        assert mechanism.__module__ == f"subquad.mechanisms.{mechanism.info.name}"
        classes = [node for node in ast.parse(Path(getfile(mechanism)).read_text()).body if isinstance(node, ast.ClassDef)]
        assert [node.name for node in classes] == [mechanism.__name__]


def test_every_mechanism_is_exported():
    assert all(getattr(sq, mechanism.__name__) is mechanism for mechanism in MECHANISMS)


def test_the_compiled_kernels_know_nothing_of_pytorch():
    sources = [path for path in (ROOT.parents[1] / "csrc").rglob("*") if path.suffix in (".cpp", ".h")]
    assert sources
    for path in sources:
        included = re.findall(r"^\s*#\s*include\s*[<\"](.*?)[>\"]", path.read_text(), flags=re.MULTILINE)
        foreign = [name for name in included if re.match(r"(torch|ATen|c10|pybind11)/|Python\.h", name)]
        assert not foreign, f"{path.name} includes {foreign}"


def test_public_names():
    assert sorted(sq.__all__) == sorted(
        [
            "Attention", "Backend", "BigBird", "Clustered", "Efficient", "Hedgehog", "Hybrid", "Induced", "Info", "InputError",
            "Linear", "Linformer", "Local", "Longformer", "Mechanism", "MechanismModule", "MissingExtraError", "Nystrom", "OptionError",
            "Performer", "Plain", "Pooled", "RFA", "Reformer", "Routing", "SVD", "Softmax", "SparseFixed", "SparseStrided",
            "State", "T2R", "StateError", "SubquadError", "Taylor", "UnknownMethodError", "UnsupportedError", "__version__",
            "attention", "backend", "info", "methods", "register", "why_not",
        ]
    )  # fmt: skip
    assert all(hasattr(sq, name) for name in sq.__all__)


def test_import_loads_nothing_but_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import subquad; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names); print(sorted(new))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['subquad']"


def test_import_does_not_load_the_compiler():
    code = "import subquad, sys; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
