"""The operators of the bucketed engine: `opcheck`, both bodies, and everything that traces or transforms them."""

from contextlib import nullcontext

import pytest
import torch
from torch.library import opcheck

import subquad as sq
from subquad.ops import dispatch
from subquad.ops.bucketed import operator
from tests.engines.test_native import needs_compiled
from tests.ops.test_kernelized import Calls
from tests.ops.test_kernelized import tensors as separate
from tests.ops.test_sparse import changed, detached, mask

MECHANISMS = [
    sq.Reformer(buckets=4, chunk=8, rounds=2),
    sq.Reformer(buckets=4, chunk=8, rounds=2, shared_qk=False),
    sq.Routing(clusters=3, chunk=8),
    sq.Routing(clusters=3, chunk=1000),
]
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
both_directions = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
pytestmark = needs_compiled


def tensors(mechanism, length=70, dtype=torch.float64, grad=False):
    """Query, key and value; two tensors if query and key are one."""
    if not mechanism.shares_query_and_key:
        return separate(length, dtype=dtype, grad=grad)
    query, _, value = separate(length, kv_heads=4, dtype=dtype, grad=grad)
    return [query, value]


def attend(*x, mechanism, **options):
    return sq.attention(x[0], x[-2], x[-1], mechanism, enable_gqa=True, **options)


@every_mechanism
@pytest.mark.parametrize("case", ["plain", "causal", "padded", "half"])
def test_opcheck(mechanism, case):
    options = {"is_causal": case == "causal"}
    if case == "padded":
        options["key_padding_mask"] = mask("between")
    x = tensors(mechanism, dtype=torch.bfloat16 if case == "half" else torch.float64, grad=True)
    with Calls() as calls:
        attend(*x, mechanism=mechanism, **options).float().square().sum().backward()
    assert [func for func, _ in calls.found] == [operator.FORWARD, operator.BACKWARD]
    for func, args in calls.found:
        opcheck(func, [detached(x, func is operator.FORWARD) for x in args])


@every_mechanism
@both_directions
@pytest.mark.parametrize("pads", [None, "right", "between"])
def test_both_bodies_give_the_same(mechanism, is_causal, pads):
    """In both passes, and where one pass runs in one body and the other in the other."""
    options = {} if pads is None else {"key_padding_mask": mask(pads)}
    with Calls() as calls:
        attend(*tensors(mechanism, grad=True), mechanism=mechanism, is_causal=is_causal, **options).square().sum().backward()
    (forward, args), (backward, more) = calls.found
    args, results = [detached(x, False) for x in args], []
    for first, second in ((nullcontext, nullcontext), (dispatch.disabled, dispatch.disabled), (dispatch.disabled, nullcontext)):
        with first():
            found = forward(*args)
        with second():
            results.append([found[0], *backward(more[0], *found, *args)])
    for found in results[1:]:
        for ours, theirs in zip(found, results[0], strict=True):
            assert ours.stride() == theirs.stride()
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
    run = torch.compile(
        lambda *x: attend(*x, mechanism=mechanism, is_causal=is_causal), fullgraph=True, dynamic=True, backend=backend
    )
    for length in (70, 90, 131):
        x = tensors(mechanism, length, grad=grad)
        torch.testing.assert_close(run(*x), attend(*x, mechanism=mechanism, is_causal=is_causal))
    assert len(graphs) == 1
    assert [node.target for node in graphs[0].graph.nodes if "subquad" in str(node.target)] == [operator.FORWARD]


@pytest.mark.parametrize("mechanism", MECHANISMS[:3], ids=str)
def test_compiled_gradients(mechanism):
    def loss(*x):
        return attend(*x, mechanism=mechanism, is_causal=True).square().sum()

    torch._dynamo.reset()
    run = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (70, 90):
        x = tensors(mechanism, length, grad=True)
        for ours, theirs in zip(torch.autograd.grad(run(*x), x), torch.autograd.grad(loss(*x), x), strict=True):
            torch.testing.assert_close(ours, theirs)


@every_mechanism
def test_gradients_of_torch_func(mechanism):
    def loss(*x):
        return attend(*x, mechanism=mechanism).square().sum()

    x, recorded = tensors(mechanism), tensors(mechanism, grad=True)
    with Calls() as calls:
        found = torch.func.grad(loss, argnums=tuple(range(len(x))))(*x)
    assert [func for func, _ in calls.found] == [operator.FORWARD, operator.BACKWARD]
    for ours, theirs in zip(found, torch.autograd.grad(loss(*recorded), recorded), strict=True):
        torch.testing.assert_close(ours, theirs)


@every_mechanism
def test_vmap(mechanism):
    x = [torch.stack([t, 2 * t, t.flip(2)]) for t in tensors(mechanism)]

    def loss(*x):
        return attend(*x, mechanism=mechanism).square().sum()

    def each(function):
        return [function(*t) for t in zip(*x, strict=True)]

    torch.testing.assert_close(torch.func.vmap(loss)(*x), torch.stack(each(loss)))
    grad = torch.func.grad(loss)
    torch.testing.assert_close(torch.func.vmap(grad)(*x), torch.stack(each(grad)))


@every_mechanism
def test_second_derivatives_are_refused(mechanism):
    x = tensors(mechanism, 20, grad=True)
    grads = torch.autograd.grad(attend(*x, mechanism=mechanism).square().sum(), x, create_graph=True)
    for grad in grads:
        with pytest.raises(sq.UnsupportedError, match="first derivatives only"):
            torch.autograd.grad(grad.square().sum(), x[0], retain_graph=True)


def test_inference_mode():
    mechanism = MECHANISMS[1]
    expected = attend(*tensors(mechanism), mechanism=mechanism)
    with torch.inference_mode(), dispatch.recorded() as choices:
        torch.testing.assert_close(attend(*tensors(mechanism), mechanism=mechanism), expected)
    assert choices[0].is_native


@pytest.mark.parametrize("name", ["query", "key", "value", "query_bucket", "key_bucket", "grad", "out", "top", "total"])
def test_tensors_that_do_not_fit_are_refused(name):
    """By the operator itself: kernels read memory."""
    mechanism, is_refused = MECHANISMS[1], []
    with Calls() as calls:
        attend(*tensors(mechanism, grad=True), mechanism=mechanism).square().sum().backward()
    for func, args in calls.found:
        if name in [argument.name for argument in func._schema.arguments]:
            args = [detached(x, False) for x in args]
            with pytest.raises(sq.InputError, match=r"must have the shape|must divide"):
                func(*changed(args, func, name, lambda x: x[:1, :1]))
            if "bucket" in name:
                with pytest.raises(sq.InputError, match="must have numbers from 0 to 4; got 5 to 5"):
                    func(*changed(args, func, name, lambda x: torch.full_like(x, 5)))
            is_refused.append(func)
    assert is_refused


@pytest.mark.parametrize("name", ["buckets", "rounds", "chunk"])
def test_numbers_that_are_no_rule_are_refused(name):
    mechanism = MECHANISMS[1]
    with Calls() as calls:
        attend(*tensors(mechanism), mechanism=mechanism)
    [(func, args)] = calls.found
    with pytest.raises(sq.InputError, match="at least 1"):
        func(*changed(args, func, name, lambda n: 0))


@every_mechanism
def test_gradients_without_tokens(mechanism):
    x = tensors(mechanism, 0, grad=True)
    out = attend(*x, mechanism=mechanism)
    assert out.shape == (2, 4, 0, 3)
    assert [g.shape for g in torch.autograd.grad(out.sum(), x)] == [t.shape for t in x]
