import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores

FAST_SIZES = (1, 65, 127)  # of the contract, in `make test-fast`


@pytest.fixture(autouse=True)
def _seeded_and_strict():
    """A fixed seed; and torch.empty returns NaN, so that what an engine forgets to write shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def third_party(monkeypatch):
    """The module `tests.third_party`, with its mechanisms registered for one test only."""
    from subquad import registry

    monkeypatch.setattr(registry, "_DEFAULTS", dict(registry._DEFAULTS))
    from tests import third_party

    for mechanism in (third_party.Checked, third_party.Unchecked):
        registry.register(mechanism)
    return third_party


def pytest_addoption(parser):
    parser.addoption(
        "--only-kernels",
        action="store_true",
        help="of the tests over every mechanism, only those of mechanisms with compiled kernels, and none under torch.compile; "
        "with SUBQUAD_NATIVE=0 they test the PyTorch fallbacks",
    )


def pytest_collection_modifyitems(config, items):
    for item in items:
        if _is_slow(item):
            item.add_marker("slow")
    if config.getoption("only_kernels"):
        left_out = [item for item in items if not _may_use_kernels(item)]
        items[:] = [item for item in items if _may_use_kernels(item)]
        config.hook.pytest_deselected(items=left_out)


def _is_slow(item):
    """Of the contract: what is not about default options, three sizes, and one graph."""
    from tests.harness import DEFAULTS

    if item.path.parent.name != "contract":
        return False
    is_compiled = _compiles(item) and item.originalname != "test_one_graph_for_all_batch_sizes"
    return _parameter(item, "case") not in DEFAULTS or _parameter(item, "size", 1) not in FAST_SIZES or is_compiled


def _may_use_kernels(item):
    from tests.kernels import has_kernels

    case = _parameter(item, "case")
    return not _compiles(item) and (not hasattr(case, "mechanism") or has_kernels(case.mechanism))


def _compiles(item):
    """Whether it is a test of torch.compile, which never calls a compiled kernel."""
    return item.function.__module__ == "subquad.testing.contract.compilation"


def _parameter(item, name, default=None):
    return item.callspec.params.get(name, default) if hasattr(item, "callspec") else default
