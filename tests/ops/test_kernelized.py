"""The operators of the kernelized engine: `opcheck`, both bodies, and everything that traces, transforms or exports them."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.library import opcheck

import subquad as sq
from subquad.ops import dispatch
from subquad.ops.kernelized import operator
from tests.engines.test_native import needs_compiled
from tests.kernels import built

MECHANISMS = [sq.Linear(), sq.Taylor(), sq.Plain(), sq.Plain(normalize="none"), sq.Efficient(), sq.Performer(features=24),
              sq.Performer(kind="relu", features=24), sq.Hedgehog(), sq.T2R(features=6)]  # fmt: skip
# Built here, since nothing can be drawn while a function is traced.
LEARNED = {m: built(m, heads=4, kv_heads=2, head_dim=5, value_dim=3) for m in MECHANISMS[-2:]}
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
both_directions = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
pytestmark = needs_compiled


def tensors(length=70, *, heads=4, kv_heads=2, dtype=torch.float64, grad=False):
    shapes = ((2, heads, length, 5), (2, kv_heads, length, 5), (2, kv_heads, length, 3))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes]


def attend(*x, mechanism, **options):
    if mechanism in LEARNED:
        return LEARNED[mechanism](*x, **options)
    return sq.attention(*x, mechanism, enable_gqa=True, **options)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """The operators of subquad that are called, with their arguments."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "subquad":
            self.found.append((func, args))
        return func(*args, **(kwargs or {}))


@every_mechanism
@both_directions
@pytest.mark.parametrize("case", ["plain", "padded", "state", "half"])
def test_opcheck(mechanism, is_causal, case):
    x = tensors(dtype=torch.bfloat16 if case == "half" else torch.float64, grad=case != "state")
    options = {"is_causal": is_causal}
    if case == "padded":
        options["key_padding_mask"] = torch.rand(2, 70, generator=torch.Generator().manual_seed(1)) > 0.3
    with Calls() as calls:
        if case == "state":
            if not is_causal:
                return
            _, state = attend(*x, mechanism=mechanism, return_state=True, **options)
            attend(*x, mechanism=mechanism, state=state, return_state=True, **options)
        else:
            attend(*x, mechanism=mechanism, **options).float().square().sum().backward()
    assert len(calls.found) == 2
    for func, args in calls.found:
        is_recorded = func is operator.FORWARD  # the operator of the backward pass is differentiated in test_second_derivatives
        opcheck(
            func,
            [x.detach().requires_grad_(x.requires_grad and is_recorded) if isinstance(x, torch.Tensor) else x for x in args],
        )


@every_mechanism
@both_directions
def test_both_bodies_give_the_same(mechanism, is_causal):
    """Of the operator itself, whatever the engine would choose."""
    with Calls() as calls:
        attend(*tensors(grad=True), mechanism=mechanism, is_causal=is_causal).square().sum().backward()
    for func, args in calls.found:
        found = func(*args)
        with dispatch.disabled():
            expected = func(*args)
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert ours.stride() == theirs.stride()
            if func is not operator.FORWARD or number != 1:  # the denominators, which may be relative to another level
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@every_mechanism
@both_directions
def test_a_backward_pass_with_the_other_body(mechanism, is_causal):
    """A compiled graph may run where kernels are turned off between its two passes, or on."""
    given = tensors(grad=True)
    expected = torch.autograd.grad(attend(*given, mechanism=mechanism, is_causal=is_causal).square().sum(), given)
    with Calls() as calls:
        attend(*given, mechanism=mechanism, is_causal=is_causal)
    [(func, args)] = calls.found
    for first, second in ((dispatch.disabled, nullcontext), (nullcontext, dispatch.disabled)):
        with first():
            out = func(*args)[0]
        with second():
            found = torch.autograd.grad(out.square().sum(), given, retain_graph=True)  # of a learned map's projection
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@every_mechanism
@both_directions
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_compiled_once_for_all_lengths(mechanism, is_causal, grad):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: attend(*x, mechanism=mechanism, is_causal=is_causal), fullgraph=True, dynamic=True, backend=backend
    )
    for length in (70, 90, 131):
        torch.testing.assert_close(
            compiled(*tensors(length, grad=grad)), attend(*tensors(length, grad=grad), mechanism=mechanism, is_causal=is_causal)
        )
    assert len(graphs) == 1
    assert [node.target for node in graphs[0].graph.nodes if "subquad" in str(node.target)] == [operator.FORWARD]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("mechanism", [sq.Linear(), sq.Performer(features=24), sq.Hedgehog()], ids=str)
def test_compiled_gradients(mechanism, backend):
    def loss(*x):
        return attend(*x, mechanism=mechanism, is_causal=True).square().sum()

    torch._dynamo.reset()
    x = tensors(grad=True)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)(*x), x)
    for ours, theirs in zip(found, torch.autograd.grad(loss(*x), x), strict=True):
        torch.testing.assert_close(ours, theirs)


@every_mechanism
def test_gradients_of_torch_func(mechanism):
    def loss(*x):
        return attend(*x, mechanism=mechanism, is_causal=True).square().sum()

    x = tensors()
    recorded = tensors(grad=True)
    with Calls() as calls:
        found = torch.func.grad(loss, argnums=(0, 1, 2))(*x)
    assert [func for func, _ in calls.found] == [operator.FORWARD, operator.BACKWARD]
    for ours, theirs in zip(found, torch.autograd.grad(loss(*recorded), recorded), strict=True):
        torch.testing.assert_close(ours, theirs)


@both_directions
@pytest.mark.parametrize("mechanism", [sq.Linear(), *LEARNED], ids=str)
def test_vmap(mechanism, is_causal):
    x = [torch.stack([t, 2 * t, t.flip(2)]) for t in tensors()]

    def loss(*x):
        return attend(*x, mechanism=mechanism, is_causal=is_causal).square().sum()

    def each(function):
        return [function(*t) for t in zip(*x, strict=True)]

    torch.testing.assert_close(torch.func.vmap(loss)(*x), torch.stack(each(loss)))
    grad = torch.func.grad(loss)
    torch.testing.assert_close(torch.func.vmap(grad)(*x), torch.stack(each(grad)))


def test_forward_mode_derivatives_run_in_pytorch():
    q, k, v = tensors()

    def out(q):
        return attend(q, k, v, mechanism="linear", is_causal=True)

    with dispatch.recorded() as choices:
        _, found = torch.func.jvp(out, (q,), (torch.ones_like(q),))
    assert choices[0].reasons == ("compiled kernels have no forward-mode derivatives",)
    step = 1e-6
    torch.testing.assert_close(found, (out(q + step) - out(q - step)) / (2 * step), rtol=1e-6, atol=1e-8)


def test_inference_mode_and_autocast():
    expected = attend(*tensors(), mechanism="linear", is_causal=True)
    with torch.inference_mode(), dispatch.recorded() as choices:
        torch.testing.assert_close(attend(*tensors(), mechanism="linear", is_causal=True), expected)
    assert choices[0].is_native
    x = tensors(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), dispatch.recorded() as choices:
        assert attend(*x, mechanism="linear", is_causal=True).dtype == torch.bfloat16
    assert choices[0].is_native


@pytest.mark.parametrize("mechanism", ["linear", "performer", "hedgehog", "t2r"])
def test_exported_and_run_in_another_process(mechanism, tmp_path):
    module = sq.Attention(dim=12, heads=3, method=mechanism).double().eval()

    class Causal(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, x):
            return self.attention(x, is_causal=True)

    length = torch.export.Dim("length", min=40, max=4096)
    program = torch.export.export(Causal(), (torch.randn(2, 64, 12, dtype=torch.float64),), dynamic_shapes={"x": {1: length}})
    assert operator.FORWARD in [node.target for node in program.graph.nodes]
    torch.export.save(program, tmp_path / "program.pt2")
    x = torch.randn(2, 101, 12, dtype=torch.float64)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch, subquad; folder = sys.argv[1]; program = torch.export.load(folder + '/program.pt2').module(); "
        "torch.save(program(torch.load(folder + '/x.pt')), folder + '/out.pt')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "out.pt"), module(x, is_causal=True))


@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "weight", "grad", "out", "denominators", "sums"])
def test_tensors_that_do_not_fit_are_refused(name):
    """By the operator itself: kernels read memory."""
    mask = torch.ones(2, 70, dtype=torch.bool)
    with Calls() as calls:
        out = attend(*tensors(grad=True), mechanism=sq.Performer(features=24), key_padding_mask=mask)
        out.square().sum().backward()
    is_refused = []
    for func, args in calls.found:
        names = [argument.name for argument in func._schema.arguments]
        if name in names and args[names.index(name)] is not None:
            place = names.index(name)
            with pytest.raises(sq.InputError, match="must have the shape"):
                func(*(x.detach()[:1, :1] if i == place else x for i, x in enumerate(args)))
            is_refused.append(func)
    assert is_refused


@every_mechanism
@pytest.mark.parametrize(("queries", "keys"), [(0, 70), (70, 0), (0, 0)])
def test_gradients_without_queries_or_keys(mechanism, queries, keys):
    q, k, v = (x[:, :, :n].detach().requires_grad_() for x, n in zip(tensors(), (queries, keys, keys), strict=True))
    grads = torch.autograd.grad(attend(q, k, v, mechanism=mechanism).sum(), (q, k, v))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("mechanism", LEARNED, ids=str)
@both_directions
def test_weights_of_a_learned_map_are_trained_with_the_kernel(mechanism, is_causal):
    module = mechanism.build(heads=4, kv_heads=2, head_dim=5).double()
    names, parameters = zip(*module.named_parameters(), strict=True)

    def out(*given):
        weights = dict(zip(names, given[3:], strict=True))
        return torch.func.functional_call(module, weights, given[:3], {"is_causal": is_causal})

    x = tensors(7, grad=True)
    with dispatch.recorded() as choices:
        assert torch.autograd.gradcheck(out, (*x, *parameters))
    assert all(choice.is_native for choice in choices)
    loss = torch.compile(lambda *x: module(*x, is_causal=is_causal).square().sum(), fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(loss(*x), parameters)
    for ours, theirs in zip(found, torch.autograd.grad(out(*x, *parameters).square().sum(), parameters), strict=True):
        torch.testing.assert_close(ours, theirs)
