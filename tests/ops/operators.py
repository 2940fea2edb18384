"""What the tests of operators share: which operators a call reaches, their two bodies, and the graphs that contain them."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.library import opcheck

import subquad as sq
from subquad.ops import dispatch
from tests.ops.test_kernelized import Calls


def calls_of(function):
    """The operators that `function` calls, with their arguments."""
    with Calls() as calls:
        function()
    return calls.found


def check(calls, recorded):
    """`opcheck` of the operators; with gradients for those that are `recorded`."""
    for func, args in calls:
        needs = func in recorded
        opcheck(
            func, [x.detach().requires_grad_(x.requires_grad and needs) if isinstance(x, torch.Tensor) else x for x in args]
        )


def assert_same_bodies(calls, within=1e-9):
    for func, args in calls:
        found = func(*args)
        with dispatch.disabled():
            expected = func(*args)
        for ours, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, rtol=within, atol=within)


def assert_same_gradients_of_both_bodies(func, args, given):
    """A compiled graph may run where kernels are turned off between its two passes, or on."""

    def gradients(first, second):
        with first():
            out = func(*args)
        with second():
            return torch.autograd.grad((out[0] if isinstance(out, tuple) else out).square().sum(), given)

    expected = gradients(nullcontext, nullcontext)
    for bodies in ((dispatch.disabled, nullcontext), (nullcontext, dispatch.disabled)):
        for ours, theirs in zip(gradients(*bodies), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def assert_compiled_once(function, inputs, operators):
    """One graph for all `inputs`, which contains these operators."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for x in inputs:
        torch.testing.assert_close(compiled(*x), function(*x))
    assert len(graphs) == 1
    assert [node.target for node in graphs[0].graph.nodes if "subquad" in str(node.target)] == operators


def assert_same_compiled_gradients(loss, inputs, backend):
    """For all `inputs`, with one graph of each pass."""
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for number, x in enumerate(inputs):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            found = torch.autograd.grad(compiled(*x), x)
        for ours, theirs in zip(found, torch.autograd.grad(loss(*x), x), strict=True):
            torch.testing.assert_close(ours, theirs)


def assert_refused(calls, name, match="must have the shape"):
    """Every operator with an argument of this name refuses one that is too small."""
    is_refused = []
    for func, args in calls:
        names = [argument.name for argument in func._schema.arguments]
        if name in names and args[names.index(name)] is not None:
            place = names.index(name)
            with pytest.raises(sq.InputError, match=match):
                func(*(x.detach()[:1, :1] if i == place else x for i, x in enumerate(args)))
            is_refused.append(func)
    assert is_refused


def exported(module, x, operators, folder):
    """The output for `x` (batch, length, channels) of the exported module, which another process loads."""
    length = torch.export.Dim("length", min=40, max=4096)
    sample = torch.randn(x.shape[0], 64, x.shape[2], dtype=x.dtype)
    program = torch.export.export(module, (sample,), dynamic_shapes=({1: length},))
    found = [node.target for node in program.graph.nodes if "subquad" in str(node.target)]
    assert found == operators
    torch.export.save(program, folder / "program.pt2")
    torch.save(x, folder / "x.pt")
    code = (
        "import sys, torch, subquad; folder = sys.argv[1]; program = torch.export.load(folder + '/program.pt2').module(); "
        "torch.save(program(torch.load(folder + '/x.pt')), folder + '/out.pt')"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    return torch.load(folder / "out.pt")
