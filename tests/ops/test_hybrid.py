"""The operators of the hybrid engine: `opcheck`, both bodies, and everything that traces, transforms or exports them."""

import math
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.library import opcheck

import subquad as sq
from subquad.ops import dispatch
from subquad.ops.hybrid import operator
from tests.engines.test_native import needs_compiled
from tests.kernels import built
from tests.ops.test_kernelized import Calls, tensors

MECHANISMS = [sq.Hybrid(window=7), sq.Hybrid(window=70, map="t2r", features=6), sq.Hybrid(window=0, map="linear")]
# Built here, since nothing can be drawn while a function is traced.
MODULES = {mechanism: built(mechanism, heads=4, kv_heads=2, head_dim=5, value_dim=3) for mechanism in MECHANISMS}
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
both_directions = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
with_and_without_pads = pytest.mark.parametrize("has_pads", [False, True], ids=["whole", "padded"])
pytestmark = needs_compiled
LENGTH = 90


def trained(mechanism):
    return built(mechanism, heads=4, kv_heads=2, head_dim=5, value_dim=3).requires_grad_()


def options(is_causal, has_pads=False, length=LENGTH):
    real = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) > 0.3
    return {"is_causal": is_causal, "key_padding_mask": real if has_pads else None}


def calls_of(module, x, **call):
    with Calls() as calls:
        module(*x, **call).float().square().sum().backward()
    assert [func for func, _ in calls.found] == [operator.FORWARD, operator.BACKWARD]
    return calls.found


@every_mechanism
@both_directions
@pytest.mark.parametrize("case", ["plain", "padded", "half", "no grouped heads, tokens first"])
def test_opcheck(mechanism, is_causal, case):
    x = tensors(LENGTH, dtype=torch.bfloat16 if case == "half" else torch.float64, grad=True)
    module = trained(mechanism)
    if case == "no grouped heads, tokens first":
        module = built(mechanism, heads=3, head_dim=5, value_dim=5).requires_grad_()
        x = [torch.randn(2, LENGTH, 3, 5, dtype=torch.float64).transpose(1, 2).requires_grad_() for _ in range(3)]
    for func, args in calls_of(module, x, **options(is_causal, case == "padded")):
        is_recorded = func is operator.FORWARD  # the operator of the backward pass is differentiated in test_second_derivatives
        opcheck(func, [t.detach().requires_grad_(t.requires_grad and is_recorded) if isinstance(t, torch.Tensor) else t for t in args])  # fmt: skip


@every_mechanism
@both_directions
@with_and_without_pads
@pytest.mark.parametrize("length", [1, 8, 71, 72, 300])
def test_both_bodies_give_the_same(mechanism, is_causal, has_pads, length):
    for func, args in calls_of(trained(mechanism), tensors(length, grad=True), **options(is_causal, has_pads, length)):
        found = func(*args)
        with dispatch.disabled():
            expected = func(*args)
        assert [x.stride() for x in found] == [x.stride() for x in expected]
        if func is operator.FORWARD:  # the weights, which may be relative to another level
            found, expected = ((out, total.log() + top, far) for out, top, total, far in (found, expected))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@every_mechanism
@both_directions
def test_a_backward_pass_with_the_other_body(mechanism, is_causal):
    module, x = trained(mechanism), tensors(LENGTH, grad=True)
    wrt = [*x, *module.parameters()]
    expected = torch.autograd.grad(module(*x, is_causal=is_causal).square().sum(), wrt)
    with Calls() as calls:
        module(*x, is_causal=is_causal)
    [(func, args)] = calls.found
    for first, second in ((dispatch.disabled, nullcontext), (nullcontext, dispatch.disabled)):
        with first():
            out = func(*args)[0]
        with second():
            found = torch.autograd.grad(out.square().sum(), wrt, retain_graph=True)  # of the projections
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@every_mechanism
@both_directions
@pytest.mark.parametrize("length", [4, 9])
def test_gradcheck(mechanism, is_causal, length):
    """Of the inputs, of the weight of the far keys, and of the projections, which are outside the operator."""
    module = trained(mechanism)
    names, parameters = zip(*module.named_parameters(), strict=True)

    def out(*given):
        weights = dict(zip(names, given[3:], strict=True))
        return torch.func.functional_call(module, weights, given[:3], {"is_causal": is_causal})

    x = tensors(length, grad=True)
    assert torch.autograd.gradcheck(out, (*(t[:1].detach().requires_grad_() for t in x), *parameters))


@pytest.mark.parametrize("mechanism", [sq.Hybrid(window=2), sq.Hybrid(window=1, map="linear")], ids=str)
@both_directions
def test_second_derivatives(mechanism, is_causal):
    def second():
        module, x = trained(mechanism), tensors(9, grad=True)
        wrt = [*x, *module.parameters()]
        out = module(*x, is_causal=is_causal)
        grad = torch.ones_like(out).requires_grad_()
        first = torch.autograd.grad(out, wrt, grad, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [grad, *wrt])

    found = second()
    with dispatch.disabled():
        expected = second()
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
    module = trained(mechanism) if grad else MODULES[mechanism]
    compiled = torch.compile(lambda *x: module(*x, is_causal=is_causal), fullgraph=True, dynamic=True, backend=backend)
    for length in (90, 70, 131, 64):
        x = tensors(length, grad=grad)
        torch.testing.assert_close(compiled(*x), module(*x, is_causal=is_causal))
    assert len(graphs) == 1
    assert [node.target for node in graphs[0].graph.nodes if "subquad" in str(node.target)] == [operator.FORWARD]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@with_and_without_pads
def test_compiled_gradients(backend, has_pads):
    module, x, call = trained(sq.Hybrid(window=7)), tensors(LENGTH, grad=True), options(True, has_pads)

    def loss(*x):
        return module(*x, **call).square().sum()

    torch._dynamo.reset()
    wrt = [*x, *module.parameters()]
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)(*x), wrt)
    for ours, theirs in zip(found, torch.autograd.grad(loss(*x), wrt), strict=True):
        torch.testing.assert_close(ours, theirs)


@every_mechanism
@both_directions
def test_transformations_of_torch_func(mechanism, is_causal):
    module = MODULES[mechanism]

    def loss(*x):
        return module(*x, is_causal=is_causal).square().sum()

    x, recorded = tensors(), tensors(grad=True)
    with Calls() as calls:
        found = torch.func.grad(loss, argnums=(0, 1, 2))(*x)
    assert [func for func, _ in calls.found] == [operator.FORWARD, operator.BACKWARD]
    for ours, theirs in zip(found, torch.autograd.grad(loss(*recorded), recorded), strict=True):
        torch.testing.assert_close(ours, theirs)
    several = [torch.stack([t, 2 * t, t.flip(2)]) for t in x]
    for function in (loss, torch.func.grad(loss)):
        each = torch.stack([function(*t) for t in zip(*several, strict=True)])
        torch.testing.assert_close(torch.func.vmap(function)(*several), each)


def test_vmap_over_the_weight_of_the_far_keys_is_refused():
    module, x = MODULES[MECHANISMS[0]], tensors()

    def out(log_mix):
        return torch.func.functional_call(module, {"log_mix": log_mix}, tuple(x), {"is_causal": True})

    with pytest.raises(sq.UnsupportedError, match=r"cannot map over its weights.*Loop over the weights instead"):
        torch.func.vmap(out)(torch.randn(3, 4, dtype=torch.float64))


def test_forward_mode_derivatives_run_in_pytorch():
    q, k, v = tensors()

    def out(q):
        return MODULES[MECHANISMS[0]](q, k, v, is_causal=True)

    with dispatch.recorded() as choices:
        _, found = torch.func.jvp(out, (q,), (torch.ones_like(q),))
    assert choices[0].reasons == ("compiled kernels have no forward-mode derivatives",)
    step = 1e-6
    torch.testing.assert_close(found, (out(q + step) - out(q - step)) / (2 * step), rtol=1e-6, atol=1e-8)


def test_inference_mode_and_autocast():
    module = MODULES[MECHANISMS[0]]
    expected = module(*tensors(), is_causal=True)
    with torch.inference_mode(), dispatch.recorded() as choices:
        torch.testing.assert_close(module(*tensors(), is_causal=True), expected)
    assert choices[0].is_native
    with torch.autocast("cpu", torch.bfloat16), dispatch.recorded() as choices:
        assert module(*tensors(dtype=torch.bfloat16), is_causal=True).dtype == torch.bfloat16
        torch.testing.assert_close(module(*tensors(), is_causal=True), expected)
    assert all(choice.is_native for choice in choices)


def test_exported_and_run_in_another_process(tmp_path):
    module = sq.Attention(dim=12, heads=3, method=sq.Hybrid(window=7)).double().eval()

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


@every_mechanism
@with_and_without_pads
@pytest.mark.parametrize("order", [(True, False), (False, True), (True, True)], ids=str)
def test_a_state_of_one_can_be_continued_by_the_other(mechanism, has_pads, order):
    module, (q, k, v), call = MODULES[mechanism], tensors(130), options(True, has_pads, 130)
    with dispatch.disabled():
        whole = module(q, k, v, **call)
    found, state = [], None
    for piece, is_compiled in zip((slice(0, 91), slice(91, 130)), order, strict=True):
        real = call["key_padding_mask"] if not has_pads else call["key_padding_mask"][:, piece]
        with nullcontext() if is_compiled else dispatch.disabled(), dispatch.recorded() as choices:
            parts = [x[:, :, piece] for x in (q, k, v)]
            out, state = module(*parts, is_causal=True, key_padding_mask=real, state=state, return_state=True)
        assert choices[0].is_native == (is_compiled and piece.start == 0)
        found.append(out)
    torch.testing.assert_close(torch.cat(found, 2), whole, rtol=0, atol=1e-11)


@both_directions
@pytest.mark.parametrize("score", [1e4, -1e4])
@pytest.mark.parametrize("log_mix", [0.0, 200.0, -200.0, -math.inf])
def test_extreme_scores_and_mixes(is_causal, score, log_mix):
    """Both bodies in float32, where e^1e4 is infinite and e^-1e4 is 0, with far features that underflow for one head."""
    module = sq.Hybrid(window=3, map="linear").build(heads=2, head_dim=16)
    module.log_mix.data.fill_(log_mix)
    q, k, v = (torch.randn(1, 2, 60, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    q, k = q.abs() * 25, k.abs() * math.copysign(abs(score) / 100, score)
    q[:, 1] -= 200  # elu(x) + 1 of it is 0
    x = [t.requires_grad_() for t in (q, k, v)]

    def run():
        out = module(*x, is_causal=is_causal)
        return out, *torch.autograd.grad(out.square().sum(), [*x, *module.parameters()])

    found = run()
    with dispatch.disabled():
        expected = run()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3 * float(theirs.detach().abs().max() + 1))


@both_directions
@every_mechanism
def test_a_sequence_of_pads_gives_zeros(is_causal, mechanism):
    module, x = trained(mechanism), tensors(LENGTH)
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[0] = False
    for t in x:
        t[0] = torch.nan
        t.requires_grad_()
    out = module(*x, is_causal=is_causal, key_padding_mask=real)
    assert (out[0] == 0).all()
    for grad in torch.autograd.grad(out.square().sum(), [*x, *module.parameters()]):
        assert grad.isfinite().all()


@every_mechanism
@both_directions
def test_no_tokens(mechanism, is_causal):
    module, x = trained(mechanism), tensors(0, grad=True)
    out = module(*x, is_causal=is_causal)
    assert out.shape == (2, 4, 0, 3)
    grads = torch.autograd.grad(out.sum(), [*x, *module.parameters()], materialize_grads=True, allow_unused=True)
    assert all((grad == 0).all() for grad in grads)


NAMES = ["key", "value", "projected_query", "projected_key", "mask", "log_mix", "grad", "out", "top", "total", "far"]


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_do_not_fit_are_refused(name):
    """By the operator itself: kernels read memory."""
    is_refused = []
    for func, args in calls_of(trained(MECHANISMS[0]), tensors(LENGTH, grad=True), **options(True, True)):
        names = [argument.name for argument in func._schema.arguments]
        if name in names:
            place = names.index(name)
            with pytest.raises(sq.InputError, match="must have the shape"):
                func(*(x.detach()[:1] if i == place else x for i, x in enumerate(args)))
            is_refused.append(func)
    assert is_refused


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("value", lambda x: x.float(), "must have one dtype; got torch.float32 and torch.float64"),
        ("projected_key", lambda x: x.float(), "must have one dtype"),
        ("query", lambda x: x[0], "must have 4 dimensions"),
        ("mask", lambda x: x.double(), "mask must have the dtype torch.bool"),
        ("kind", lambda _: 3, r"kind must be one of 0 \(elu\), 4 \(relu\), 7 \(hedgehog\); got 3"),
        ("kind", lambda _: 99, "kind must be one of"),
        ("window", lambda _: -1, "window must be at least 0; got -1"),
    ],
)
def test_arguments_of_another_kind_are_refused(name, change, message):
    for func, args in calls_of(trained(MECHANISMS[0]), tensors(LENGTH, grad=True), **options(True, True)):
        names = [argument.name for argument in func._schema.arguments]
        given = [change(x) if argument == name else x for argument, x in zip(names, args, strict=True)]
        with pytest.raises(sq.InputError, match=message):
            func(*(x.detach() if isinstance(x, torch.Tensor) else x for x in given))
