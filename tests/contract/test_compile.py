"""Contract 13: one graph under torch.compile, with the same numbers, for all batch sizes. Fake and meta tensors work."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import subquad as sq
from tests.harness import DEFAULTS, VALUE_DIM, Case, Inputs, assert_close, every_case, every_default, inputs


def compiled(case, is_causal, backend, **sizes):
    module = case.build(**sizes)

    def run(*x):
        return case.run(Inputs(*x), module, is_causal=is_causal)

    torch._dynamo.reset()
    return torch.compile(run, fullgraph=True, backend=backend)


@every_case
@torch.no_grad()
def test_one_graph_for_all_batch_sizes(case):
    if case.info.graph_breaks:
        pytest.skip(case.info.graph_breaks)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    for is_causal in case.directions if case in DEFAULTS else case.directions[-1:]:
        run = compiled(case, is_causal, backend, heads=1)
        graphs.clear()
        for batch in (2, 3, 5):
            x = inputs(130 if case.info.engine in ("kernelized", "hybrid") else 70, batch=batch, heads=1)
            for t in x:
                torch._dynamo.mark_dynamic(t, 0)
            assert_close(run(*x), case.run(x, is_causal=is_causal))
        assert len(graphs) == 1


@every_default
@torch.no_grad()
def test_inductor_gives_the_same_numbers(case):
    if case.info.graph_breaks:
        pytest.skip(case.info.graph_breaks)
    x, is_causal = inputs(70, heads=1), case.directions[-1]
    assert_close(compiled(case, is_causal, "inductor", heads=1)(*x), case.run(x, is_causal=is_causal))


@every_default
def test_compiled_gradients(case):
    if case.info.graph_breaks:
        pytest.skip(case.info.graph_breaks)
    x, is_causal = inputs(70, heads=1, grad=True), case.directions[-1]
    outs = compiled(case, is_causal, "aot_eager", heads=1)(*x), case.run(x, is_causal=is_causal)
    grads = [torch.autograd.grad(out.square().sum(), [case.query(x), x.key, x.value]) for out in outs]
    for ours, theirs in zip(*grads, strict=True):
        assert_close(ours, theirs)


@every_default
@torch.no_grad()
def test_function_compiles(case):
    case.skip_unless(functional=True)
    torch._dynamo.reset()
    x = inputs(70)
    if case.info.graph_breaks:
        pytest.skip(case.info.graph_breaks)
    is_causal = case.directions[-1]
    run = torch.compile(lambda *x: case.function(Inputs(*x), is_causal=is_causal), fullgraph=True, backend="eager")
    assert_close(run(*x), case.function(x, is_causal=is_causal))


@every_case
def test_meta_device(case):
    module = case.config.build(heads=3, head_dim=5, value_dim=VALUE_DIM, dim=11).eval().to("meta")
    x = inputs(70, dtype=torch.float32).map(lambda t: t.to("meta"))
    for is_causal in case.directions:
        out = case.run(x, module, is_causal=is_causal)
        assert out.shape == (2, 3, 70, VALUE_DIM)
        assert out.device.type == "meta"


@every_case
def test_built_on_the_default_device(case):
    with torch.device("meta"):
        module = case.config.build(heads=3, head_dim=5, value_dim=VALUE_DIM, dim=11)
    assert {t.device.type for t in module.state_dict().values()} <= {"meta"}


@every_case
@torch.no_grad()
def test_fake_tensors_neither_use_nor_leave_a_draw(case):
    case.skip_unless(functional=True)
    real, is_causal = inputs(70), case.directions[-1]
    expected = case.function(real, is_causal=is_causal)
    unseen = Case(replace(case.config, seed=12345)) if case.info.random else case
    for other in (case, unseen):
        with FakeTensorMode():
            fake = other.function(real.map(lambda t: torch.empty(t.shape, dtype=t.dtype)), is_causal=is_causal)
            assert fake.shape == expected.shape
        assert other.function(real, is_causal=is_causal).isfinite().all()


@every_default
@torch.no_grad()
def test_compiled_decoding(case):
    """Pieces of two lengths: one graph for the prompt, one for its continuation by the same length."""
    case.skip_unless(decode=True)
    if case.info.graph_breaks:
        pytest.skip(case.info.graph_breaks)
    x, module = inputs(70, heads=1), case.build(heads=1)

    def step(query, key, value, hidden, state):
        return case.run(Inputs(query, key, value, hidden), module, is_causal=True, state=state, return_state=True)

    torch._dynamo.reset()
    run, state, outs = torch.compile(step, fullgraph=True, backend="eager"), None, []
    for piece in (x.tokens(0, 68), x.tokens(68, 69), x.tokens(69, 70)):
        out, state = run(*piece, state)
        outs.append(out)
    assert_close(torch.cat(outs, dim=2), case.run(x, is_causal=True))


@torch.no_grad()
def test_softmax_takes_any_length_under_dynamic_shapes():
    """With a kernelized mechanism a new length unrolls other chunks, so it is a new graph."""
    torch._dynamo.reset()
    run = torch.compile(lambda q, k, v: sq.attention(q, k, v, is_causal=True), fullgraph=True, dynamic=True, backend="eager")
    for length in (70, 33, 1):
        x = inputs(length)
        assert_close(run(x.query, x.key, x.value), sq.attention(x.query, x.key, x.value, is_causal=True))
