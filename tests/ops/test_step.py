"""The operator of a decode step that overwrites the sums: `opcheck`, both bodies, and a compiled step."""

import pytest
import torch
from torch.library import opcheck

import subquad as sq
from subquad.errors import InputError, StateError
from subquad.ops import dispatch
from subquad.ops.kernelized import step
from tests.engines.test_native import needs_compiled

MECHANISMS = [sq.Linear(), sq.Taylor(), sq.Plain(), sq.Efficient(), sq.Performer(features=24)]
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.info.name)
pytestmark = needs_compiled


def tensors(length, seed=0, dtype=torch.float64):
    shapes = ((2, 4, length, 5), (2, 2, length, 5), (2, 2, length, 3))
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def call(x, mechanism, state=None):
    return sq.attention(*x, mechanism, enable_gqa=True, is_causal=True, state=state, return_state=True)


def recorded(mechanism, dtype=torch.float64):
    """The arguments of the operator in a step after nine tokens."""
    found, state = [], call(tensors(9, dtype=dtype), mechanism)[1]

    def backend(graph, example):
        def run(*given):
            interpreter = Recorder(graph, found)
            return interpreter.run(*given)

        return run

    torch._dynamo.reset()
    torch.compile(lambda *x: call(x[:3], mechanism, state.donate())[0], backend=backend, fullgraph=True)(*tensors(1, 1, dtype))
    [arguments] = found
    return arguments


class Recorder(torch.fx.Interpreter):
    def __init__(self, graph, found):
        super().__init__(graph)
        self.found = found

    def call_function(self, target, args, kwargs):
        if target is step.STEP:
            self.found.append([x.clone() if isinstance(x, torch.Tensor) else x for x in args])
        return super().call_function(target, args, kwargs)


@every_mechanism
@torch.no_grad()
def test_opcheck(mechanism):
    opcheck(step.STEP, recorded(mechanism))


@every_mechanism
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@torch.no_grad()
def test_both_bodies_give_the_same(mechanism, dtype):
    arguments = recorded(mechanism, dtype)
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    found = step.STEP(*arguments)
    with dispatch.disabled():
        expected = step.STEP(*copies)
    options = {"rtol": 1e-4, "atol": 1e-5} if dtype != torch.float64 else {}
    torch.testing.assert_close(found, expected, **options)
    for ours, theirs in zip(arguments[3:6], copies[3:6], strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, **options)


@torch.no_grad()
def test_tensors_that_do_not_fit_are_refused():
    arguments = recorded(sq.Linear())
    with pytest.raises(StateError, match="the sums of a state must have the shapes"):
        step.STEP(*arguments[:3], arguments[3][:, :1], *arguments[4:])
    with pytest.raises(InputError, match="value must have the shape"):
        step.STEP(arguments[0], arguments[1], arguments[2][:1], *arguments[3:])


@every_mechanism
@torch.no_grad()
def test_a_compiled_step_overwrites_the_sums(mechanism):
    torch._dynamo.reset()
    run = torch.compile(lambda q, k, v, state: call((q, k, v), mechanism, state.donate()), fullgraph=True, dynamic=True)
    whole = tensors(12)
    expected = sq.attention(*whole, mechanism, enable_gqa=True, is_causal=True)
    _, state = call([t[:, :, :9] for t in whole], mechanism)
    for i in range(9, 12):
        before = state.tensors["S"].data_ptr()
        out, state = run(*(t[:, :, i : i + 1].contiguous() for t in whole), state)
        torch.testing.assert_close(out, expected[:, :, i : i + 1])
        assert state.tensors["S"].data_ptr() == before
