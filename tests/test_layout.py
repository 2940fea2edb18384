"""The shape of the package: what it exports, what imports what, and that importing it loads little."""

import ast
import subprocess
import sys
from pathlib import Path

import subquad as sq

ROOT = Path(sq.__file__).parent
# A module may import from the layers before its own, and from its own.
LAYERS = [
    {"errors", "extras", "files", "masks", "pretrained", "recomputation", "reference", "rotary"},
    {"state"},
    {"engines"},
    {"mechanisms"},
    {"registry", "checks"},
    {"api"},
    {"layer"},
    {"__init__"},
    {"models"},
    {"bench"},
    {"tasks"},
    {"training"},
    {"conversion"},
    {"generation"},
    {"report"},
    {"cli", "cli_convert", "cli_generate", "cli_parts", "cli_train", "__main__"},
]


def imports(path):
    """Modules of subquad that a file imports when it is itself imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "subquad":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [n.name for n in node.names if n.name.islower()] or ["__init__"]
        elif isinstance(node, ast.Import):
            yield from ["__init__" for n in node.names if n.name == "subquad"]


def layer_of(name):
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def test_imports_go_one_way():
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for name in imports(path):
            if path.name == "__init__.py" and path.parent == ROOT:
                continue
            assert layer_of(name) <= layer_of(own), f"{path.relative_to(ROOT)} imports {name}"


def test_the_reference_imports_nothing_that_it_checks():
    for path in (ROOT / "reference").glob("*.py"):
        assert set(imports(path)) <= {"reference"}


def test_public_names():
    assert sorted(sq.__all__) == sorted(
        [
            "Attention", "BigBird", "Clustered", "Config", "Efficient", "Hedgehog", "Hybrid", "Induced", "Info", "InputError", "Linear",
            "Linformer", "Local", "Longformer", "Mechanism", "MissingExtraError", "Nystrom", "OptionError", "Performer",
            "Plain", "Pooled", "RFA", "Reformer", "Routing", "SVD", "Softmax", "SparseFixed", "SparseStrided", "State", "T2R",
            "StateError", "SubquadError", "Taylor", "UnknownMethodError", "UnsupportedError", "__version__", "attention",
            "info", "methods", "why_not",
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
