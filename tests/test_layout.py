"""The shape of the package: what it exports, what imports what, and that importing it loads little and changes nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import subquad as sq

ROOT = Path(sq.__file__).parent
# A module may import from the rooms before its own, and from its own; in function bodies too.
ROOMS = [
    {"errors", "masks", "rotary", "state", "runs"},
    {"ops"},
    {"engines"},
    {"families"},
    {"mechanisms"},
    {"registry", "checks"},
    {"attention"},
    {"layer"},
    {"models"},
    {"distributed"},
    {"bench", "tasks"},
    {"training", "conversion"},
    {"report"},
    {"cli", "__main__"},
]
FREE = {"bench", "testing"}  # may import the reference, too


def imports(path):
    """The rooms of subquad that a file imports from, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "subquad":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.partition(".")[2].split(".")[0] for alias in node.names if alias.name.split(".")[0] == "subquad"
            )


def room_of(name):
    return next((i for i, room in enumerate(ROOMS) if name in room), None)


def modules():
    return [p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.name != "__init__.py"]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if own in ("reference", "testing"):
        return
    for name in imports(path):
        if name == "reference":
            assert own in FREE
            continue
        assert room_of(name) is not None, f"{name!r} is no room: import from the module that defines it"
        assert room_of(name) <= room_of(own), f"{own} stands before {name}"


def test_training_and_conversion_do_not_import_each_other():
    assert not {"training", "bench"} & {name for path in (ROOT / "conversion").rglob("*.py") for name in imports(path)}
    assert "conversion" not in {name for path in (ROOT / "training").rglob("*.py") for name in imports(path)}


def test_the_reference_imports_nothing_that_it_checks():
    for path in (ROOT / "reference").glob("*.py"):
        assert set(imports(path)) <= {"reference"}


def test_public_names():
    assert sorted(sq.__all__) == sorted(
        [
            "Attention", "BigBird", "Clustered", "Efficient", "Hedgehog", "Hybrid", "Induced", "Info", "InputError", "Linear",
            "Linformer", "Local", "Longformer", "Mechanism", "MechanismModule", "MissingExtraError", "Nystrom", "OptionError",
            "Performer", "Plain", "Pooled", "RFA", "Reformer", "Routing", "SVD", "Softmax", "SparseFixed", "SparseStrided",
            "State", "T2R", "StateError", "SubquadError", "Taylor", "UnknownMethodError", "UnsupportedError", "__version__",
            "attention", "info", "methods", "register", "why_not",
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
