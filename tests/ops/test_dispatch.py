"""What chooses between compiled kernels and PyTorch, and what it records."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import subquad as sq
from subquad.ops import dispatch, native_library
from subquad.ops.dispatch import Choice
from tests.engines.test_native import needs_compiled


def tensors(grad=False):
    return [torch.randn(1, 2, 9, 4, requires_grad=grad) for _ in range(3)]


def recorded(function):
    with dispatch.recorded() as choices:
        function()
    return [str(choice) for choice in choices]


def test_a_choice_is_readable():
    assert str(Choice("subquad::a_forward")) == "subquad::a_forward: native"
    assert str(Choice("subquad::a", ("one", "another"))) == "subquad::a: pytorch (one; another)"
    assert Choice("subquad::a").body == "native"
    assert not Choice("subquad::a", ("one",)).is_native


@needs_compiled
def test_every_operator_is_recorded_with_its_body():
    """In eager mode too, where the native body may be called directly."""
    assert recorded(lambda: sq.attention(*tensors(), "linear")) == ["subquad::kernelized_forward: native"]
    assert recorded(lambda: sq.attention(*tensors(grad=True), "linear").sum().backward()) == [
        "subquad::kernelized_forward: native",
        "subquad::kernelized_backward: native",
    ]


@needs_compiled
def test_what_an_engine_chose_stands_until_its_operators_run():
    with dispatch.recorded() as choices:
        assert dispatch.choose("sparse", tensors())
        dispatch.note("sparse_forward")
        dispatch.note("sparse_forward")
        assert dispatch.choose("bucketed", tensors())
    assert [choice.operator for choice in choices] == [
        "subquad::sparse_forward",
        "subquad::sparse_forward",
        "subquad::bucketed",
    ]


@needs_compiled
@pytest.mark.parametrize("name", ["clustered_forward", "kernelized_forward"])
def test_an_operator_without_kernels_says_why(name):
    method = {"clustered_forward": sq.Clustered(clusters=2), "kernelized_forward": sq.Linear()}[name]
    calls = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name() == f"subquad::{name}":
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    with Calls():
        sq.attention(*tensors(grad=True), method)
    [(func, args)] = calls
    with dispatch.disabled(), dispatch.recorded() as choices:
        func(*args)
    off = "compiled kernels are turned off, by SUBQUAD_NATIVE=0 or subquad.ops.disabled()"
    assert choices == [Choice(f"subquad::{name}", (off,))]


def test_reasons(monkeypatch):
    x = tensors()
    with dispatch.disabled():
        assert dispatch.select(x)[0] == "pytorch"
        assert "turned off" in dispatch.select(x)[1][0]
        assert dispatch.select(x, ["the engine knows one"]) == ("pytorch", ("the engine knows one",))
    assert "are on 'meta'" in dispatch.select([t.to("meta") for t in x])[1][-1]
    with torch.autograd.forward_ad.dual_level():
        assert dispatch.select(x)[1][-1] == "compiled kernels have no forward-mode derivatives"
    monkeypatch.setattr(native_library, "load", lambda: None)
    assert "compiled kernels for this processor" in dispatch.select(x)[1][0]


@needs_compiled
def test_fake_tensors_are_recorded_only_if_asked_for():
    for wanted in (False, True):
        with FakeTensorMode(), dispatch.recorded(on_fake_tensors=wanted) as choices:
            sq.attention(*tensors(), "linear")
        assert Choice("subquad::kernelized_forward") in choices or not wanted
        assert len(choices) == 1
