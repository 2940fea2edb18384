"""The operators of the block-sparse engine: `opcheck`, both bodies, and everything that traces, transforms or exports them."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import subquad as sq
from subquad.ops import dispatch
from subquad.ops.sparse import operator
from subquad.ops.sparse.pattern import Pattern
from tests.engines.test_native import needs_compiled
from tests.ops.test_kernelized import Calls, tensors

MECHANISMS = [
    sq.Local(window=9),
    sq.Local(window=4, dilation=3),
    sq.SparseStrided(),
    sq.SparseStrided(stride=7, heads="split"),
    sq.SparseFixed(summary=2),
    sq.SparseFixed(stride=8, heads="split"),
    sq.Longformer(window=9, num_global=3),
    sq.Longformer(window=5, num_global=0, dilation=(1, 2, 1, 2)),
    sq.Longformer(window=5, num_global=2, global_projections=True),
    sq.BigBird(block=8),
    sq.BigBird(block=8, mode="etc", globals=1),
    sq.Pooled(stride=6, window=5),
]
PLAIN = [mechanism for mechanism in MECHANISMS if "functional" not in mechanism.refuses]
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
both_directions = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
pytestmark = needs_compiled
PADS = {"right": lambda i, b: i < 60 - 20 * b, "left": lambda i, b: i >= 7 + 20 * b, "between": lambda i, b: i % (3 + b) > 0}


def mask(where, length=70):
    return PADS[where](torch.arange(length), torch.arange(2)[:, None]).expand(2, length)


def module(mechanism, dtype=torch.float64):
    torch.manual_seed(3)
    return mechanism.build(heads=4, head_dim=5, kv_heads=2, value_dim=3, dim=6).to(dtype)


def attend(*x, mechanism, built=None, **options):
    """As a module, with its weights, if it has any."""
    if mechanism in PLAIN:
        return sq.attention(*x, mechanism, enable_gqa=True, **options)
    if mechanism.reads_tokens:
        length = x[0].shape[2]
        options["hidden"] = (torch.arange(2 * length * 6) % 13 / 6 - 1).reshape(2, length, 6).to(x[0].dtype)
    return (built or module(mechanism, x[0].dtype))(*x, **options)


def supports(mechanism, **needs):
    return not mechanism.reasons([need for need, is_needed in needs.items() if is_needed])


def detached(x, is_recorded):
    """An argument of an operator, as one of a new call."""
    return x.detach().clone().requires_grad_(x.requires_grad and is_recorded) if isinstance(x, torch.Tensor) else x


def recorded_calls(mechanism, **options):
    with Calls() as calls:
        attend(*tensors(grad=True), mechanism=mechanism, **options).square().sum().backward()
    assert [func for func, _ in calls.found] == [operator.FORWARD, operator.BACKWARD]
    return calls.found


@every_mechanism
@pytest.mark.parametrize("case", ["plain", "causal", "padded", "half"])
def test_opcheck(mechanism, case):
    if not supports(mechanism, is_causal=case == "causal", key_padding_mask=case == "padded"):
        return
    options = {"is_causal": case == "causal"}
    if case == "padded":
        options["key_padding_mask"] = mask("between")
    x = tensors(dtype=torch.bfloat16 if case == "half" else torch.float64, grad=True)
    with Calls() as calls:
        attend(*x, mechanism=mechanism, **options).float().square().sum().backward()
    assert [func for func, _ in calls.found] == [operator.FORWARD, operator.BACKWARD]
    for func, args in calls.found:
        # A gradient of the operator of the backward pass is refused: test_second_derivatives_are_refused.
        opcheck(func, [detached(x, func is operator.FORWARD) for x in args])


@every_mechanism
@both_directions
@pytest.mark.parametrize("pads", [None, "right", "left", "between"])
def test_both_bodies_give_the_same(mechanism, is_causal, pads):
    """In both passes, and where one pass runs in one body and the other in the other."""
    if not supports(mechanism, is_causal=is_causal, key_padding_mask=pads is not None):
        return
    options = {} if pads is None else {"key_padding_mask": mask(pads)}
    (forward, args), (backward, more) = recorded_calls(mechanism, is_causal=is_causal, **options)
    grad = more[0]
    results = []
    for first, second in ((nullcontext, nullcontext), (dispatch.disabled, dispatch.disabled), (nullcontext, dispatch.disabled)):
        with first():
            found = forward(*[detached(x, False) for x in args])
        with second():
            results.append([found[0], *backward(grad, *found, *[detached(x, False) for x in args])])
    for found in results[1:]:
        for ours, theirs in zip(found, results[0], strict=True):
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mechanism", [sq.Local(window=60), sq.Local(window=9, dilation=3), sq.BigBird(block=16)], ids=str)
@pytest.mark.parametrize("pads", ["right", "left"])
def test_threads_that_share_a_padded_sequence(mechanism, pads):
    """More threads than sequences: each has gradients of its own, which are added to those of the span."""
    real = PADS[pads](torch.arange(300), torch.tensor([[0]]))

    def results():
        x = [torch.randn(1, 1, 300, 16, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        out = sq.attention(*x, mechanism, key_padding_mask=real)
        return [out, *torch.autograd.grad(out.square().sum(), x)]

    generator, threads = torch.Generator(), torch.get_num_threads()
    found = []
    try:
        for number in (1, 4):
            torch.set_num_threads(number)
            generator.manual_seed(4)
            found.append(results())
    finally:
        torch.set_num_threads(threads)
    for one, four in zip(*found, strict=True):
        torch.testing.assert_close(one, four, rtol=1e-9, atol=1e-9)


@every_mechanism
@both_directions
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_compiled_once_for_all_lengths(mechanism, is_causal, grad):
    if not supports(mechanism, is_causal=is_causal):
        return
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    built = module(mechanism)
    run = torch.compile(
        lambda *x: attend(*x, mechanism=mechanism, built=built, is_causal=is_causal),
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )
    for length in (70, 90, 131):
        x = tensors(length, grad=grad)
        torch.testing.assert_close(run(*x), attend(*x, mechanism=mechanism, built=built, is_causal=is_causal))
    assert len(graphs) == 1
    assert [node.target for node in graphs[0].graph.nodes if "subquad" in str(node.target)] == [operator.FORWARD]


@pytest.mark.parametrize("mechanism", [sq.Local(window=9), sq.Longformer(window=9, num_global=3)], ids=str)
def test_compiled_once_with_masks(mechanism):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(
        lambda *x, **masks: attend(*x, mechanism=mechanism, **masks), fullgraph=True, dynamic=True, backend=backend
    )
    for length in (70, 90, 131):
        masks = {"key_padding_mask": mask("right", length)}
        if mechanism.info.global_mask:
            masks["global_mask"] = torch.arange(length).expand(2, -1) % 29 == 2
        x = tensors(length)
        torch.testing.assert_close(run(*x, **masks), attend(*x, mechanism=mechanism, **masks))
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("mechanism", [sq.Local(window=9), sq.BigBird(block=8)], ids=str)
def test_compiled_gradients(mechanism, backend):
    def loss(*x):
        return attend(*x, mechanism=mechanism, is_causal=True).square().sum()

    torch._dynamo.reset()
    run = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for length in (70, 90):
        x = tensors(length, grad=True)
        for ours, theirs in zip(torch.autograd.grad(run(*x), x), torch.autograd.grad(loss(*x), x), strict=True):
            torch.testing.assert_close(ours, theirs)


@every_mechanism
def test_gradients_of_torch_func(mechanism):
    built = module(mechanism)

    def loss(*x):
        return attend(*x, mechanism=mechanism, built=built).square().sum()

    x = tensors()
    recorded = tensors(grad=True)
    with Calls() as calls:
        found = torch.func.grad(loss, argnums=(0, 1, 2))(*x)
    assert [func for func, _ in calls.found] == [operator.FORWARD, operator.BACKWARD]
    for ours, theirs in zip(found, torch.autograd.grad(loss(*recorded), recorded), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mechanism", PLAIN, ids=str)
def test_vmap(mechanism):
    x = [torch.stack([t, 2 * t, t.flip(2)]) for t in tensors()]

    def loss(*x):
        return attend(*x, mechanism=mechanism).square().sum()

    def each(function):
        return [function(*t) for t in zip(*x, strict=True)]

    torch.testing.assert_close(torch.func.vmap(loss)(*x), torch.stack(each(loss)))
    grad = torch.func.grad(loss)
    torch.testing.assert_close(torch.func.vmap(grad)(*x), torch.stack(each(grad)))


def test_vmap_over_learned_keys_is_refused():
    mechanism = sq.BigBird(block=8, mode="etc", globals=1)
    built = module(mechanism)
    weights = {name: torch.stack([x, x]) for name, x in built.named_parameters()}
    x = tuple(tensors())
    run = torch.func.vmap(lambda weights: torch.func.functional_call(built, weights, x))
    with pytest.raises(sq.UnsupportedError, match=r"torch\.func\.vmap"):
        run(weights)


@every_mechanism
def test_second_derivatives_are_refused(mechanism):
    x = tensors(20, grad=True)
    grads = torch.autograd.grad(attend(*x, mechanism=mechanism).square().sum(), x, create_graph=True)
    for grad in grads:
        with pytest.raises(sq.UnsupportedError, match="first derivatives only"):
            torch.autograd.grad(grad.square().sum(), x[0], retain_graph=True)


def test_inference_mode_and_autocast():
    expected = attend(*tensors(), mechanism=sq.BigBird(block=8))
    with torch.inference_mode(), dispatch.recorded() as choices:
        torch.testing.assert_close(attend(*tensors(), mechanism=sq.BigBird(block=8)), expected)
    assert choices[0].is_native
    x = tensors(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), dispatch.recorded() as choices:
        assert attend(*x, mechanism=sq.Local(window=9)).dtype == torch.bfloat16
    assert choices[0].is_native


def test_what_inference_mode_has_cached_serves_training():
    mechanism = sq.BigBird(block=8, window=1, random=2, seed=77)
    with torch.inference_mode():
        attend(*tensors(61), mechanism=mechanism)
    x = tensors(61, grad=True)
    attend(*x, mechanism=mechanism).sum().backward()
    assert x[0].grad.isfinite().all()


@every_mechanism
def test_fake_tensors(mechanism):
    x = tensors()
    built = module(mechanism)
    expected = attend(*x, mechanism=mechanism, built=built)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = attend(*(mode.from_tensor(t) for t in x), mechanism=mechanism, built=built)
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_exported_and_run_in_another_process(tmp_path):
    built = sq.Attention(dim=12, heads=3, method=sq.Local(window=7)).double().eval()
    length = torch.export.Dim("length", min=20, max=4096)
    program = torch.export.export(built, (torch.randn(2, 64, 12, dtype=torch.float64),), dynamic_shapes=({1: length},))
    assert operator.FORWARD in [node.target for node in program.graph.nodes]
    torch.export.save(program, tmp_path / "program.pt2")
    x = torch.randn(2, 101, 12, dtype=torch.float64)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch, subquad; folder = sys.argv[1]; program = torch.export.load(folder + '/program.pt2').module(); "
        "torch.save(program(torch.load(folder + '/x.pt')), folder + '/out.pt')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "out.pt"), built(x))


def changed(args, func, name, value):
    place = [argument.name for argument in func._schema.arguments].index(name)
    return [value(x) if i == place else x for i, x in enumerate(args)]


@pytest.mark.parametrize(
    "name", ["query", "key", "value", "mask", "global_query", "global_key", "global_value", "grad", "out", "top", "total"]
)
def test_tensors_that_do_not_fit_are_refused(name):
    """By the operator itself: kernels read memory."""
    mechanism = sq.Longformer(window=5, num_global=2, global_projections=True)
    is_refused = []
    for func, args in recorded_calls(mechanism, key_padding_mask=mask("right")):
        if name in [argument.name for argument in func._schema.arguments]:
            args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
            with pytest.raises(sq.InputError, match=r"must have the shape|must divide"):
                func(*changed(args, func, name, lambda x: x[:1, :1]))
            if name not in ("query", "grad", "out"):
                with pytest.raises(sq.InputError, match="the dtype"):
                    func(*changed(args, func, name, lambda x: x.to(torch.float16)))
            is_refused.append(func)
    assert is_refused


@pytest.mark.parametrize("name", ["draw", "extra_key", "extra_value"])
def test_weights_that_do_not_fit_are_refused(name):
    for func, args in recorded_calls(sq.BigBird(block=8, mode="etc", globals=1)):
        args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        for value in (lambda x: x[:1], lambda x: x[None], lambda x: None):
            with pytest.raises(sq.InputError):
                func(*changed(args, func, name, value))


# A window is [0, before, after, dilation, without_self], after the global rule [] of length 0, all heads (-1) and one set.
@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [0],
        [0, -1],
        [0, -1, 0],
        [0, -1, 1],
        [0, -1, 1, 9, 1, 1, 1, 0],
        [0, -1, 1, -1, 1, 1, 1, 0],
        [0, -1, 1, 0, 1, 1],
        [0, -1, 1, 0, -5, 1, 1, 0],
        [0, -1, 1, 0, 1, 1, 0, 0],
        [0, -1, 1, 0, 1, 1, 2**40, 0],
        [0, -1, 1, 0, 1, 1, 1, 0, 7],
        [0, -1, 10**9, 0, 1, 1, 1, 0],
        [0, 2, 0, 1, 1, 0, 1, 1, 1, 0],
        [0, 4, 0, 1, 2, 2, 1, 0, 1, 1, 1, 0],
        [0, 5, 0, 1, 2, 3, 4, 1, 0, 1, 1, 1, 0],
        [0, -1, 1, 0, 1, 1, 1, 0, -1, 1, 0, 1, 1, 1, 0],
        [0, -1, 1, 2, 4, 5, 0],
        [0, -1, 1, 3, 8, 1, 1, 0, 0, 0],
        [1, -3, -1, 1, 0, 1, 1, 1, 0],
        [2, 1, 1, -1, 1, 0, 1, 1, 1, 0],
        [4, 1, 1, 1, 1, -1, 1, 0, 1, 1, 1, 0],
        [10**9, -1, 1, 0, 1, 1, 1, 0],
    ],
    ids=str,
)
def test_numbers_that_are_no_pattern_are_refused(numbers):
    with pytest.raises(sq.InputError, match="sparse pattern"):
        operator.FORWARD(*tensors(), *[None] * 8, numbers, 1.0, False)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@both_directions
def test_the_numbers_of_a_pattern_describe_it(mechanism, is_causal):
    query, key, value = tensors()
    weights = dict(module(mechanism).state_dict())
    hidden = torch.zeros(2, 70, 6, dtype=torch.float64)
    call = sq.engines.call.Call(query=query, key=key, value=value, is_causal=is_causal, weights=weights, hidden=hidden)
    pattern = mechanism.layout(call).pattern
    assert Pattern.of(pattern.numbers) == pattern


@pytest.mark.parametrize("mechanism", PLAIN, ids=str)
def test_gradients_without_tokens(mechanism):
    x = tensors(0, grad=True)
    out = attend(*x, mechanism=mechanism)
    assert out.shape == (2, 4, 0, 3)
    assert [g.shape for g in torch.autograd.grad(out.sum(), x)] == [t.shape for t in x]
