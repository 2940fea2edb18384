"""The operators of the clustered engine: `opcheck`, both bodies, and everything that traces, transforms or exports them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import subquad as sq
from subquad.ops import dispatch
from subquad.ops.clustered import operator
from tests.engines.test_native import needs_compiled
from tests.ops import operators
from tests.ops.test_kernelized import tensors

MECHANISM = sq.Clustered(clusters=9, topk=5, bits=11, iterations=3)
FORWARD = [operator.ASSIGN, operator.FORWARD]
pytestmark = needs_compiled


def attend(*x, mechanism=MECHANISM, **options):
    return sq.attention(*x, mechanism, enable_gqa=True, **options)


def loss(*x):
    return attend(*x).square().sum()


def options_of(case):
    if case != "padded":
        return {}
    mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[1, 3:] = False  # fewer than the top keys
    return {"key_padding_mask": mask}


def calls(case="plain"):
    x = tensors(dtype=torch.bfloat16 if case == "half" else torch.float64, grad=True)
    return operators.calls_of(lambda: attend(*x, **options_of(case)).float().square().sum().backward())


@pytest.mark.parametrize("case", ["plain", "padded", "half"])
def test_opcheck(case):
    found = calls(case)
    assert [func for func, _ in found] == [*FORWARD, operator.BACKWARD]
    operators.check(found, [operator.FORWARD])


@pytest.mark.parametrize("case", ["plain", "padded"])
def test_both_bodies_give_the_same(case):
    operators.assert_same_bodies(calls(case))


@pytest.mark.parametrize("change", [lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT,
                                    lambda x: x[:, :1].expand_as(x)], ids=["tokens first", "channels apart", "shared"])  # fmt: skip
def test_results_have_the_promised_strides(change):
    _, (forward, args), _ = calls()
    args = [*(change(x.detach()) for x in args[:3]), *args[3:]]
    operators.assert_same_bodies([(forward, args)])
    with FakeTensorMode() as mode:
        promised = forward(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args))
    assert [(x.shape, x.stride(), x.dtype) for x in promised] == [(x.shape, x.stride(), x.dtype) for x in forward(*args)]


def test_a_backward_pass_with_the_other_body():
    x = tensors(grad=True)
    _, (func, args) = operators.calls_of(lambda: attend(*x))
    operators.assert_same_gradients_of_both_bodies(func, [*x, *(t for t in args[3:])], x)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_compiled_once_for_all_lengths(grad):
    """Also below the number of clusters."""
    operators.assert_compiled_once(attend, [tensors(length, grad=grad) for length in (70, 90, 131, 7)], FORWARD)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients(backend):
    operators.assert_same_compiled_gradients(loss, [tensors(length, grad=True) for length in (70, 101)], backend)


def test_gradients_of_torch_func():
    x, recorded, found = tensors(), tensors(grad=True), []
    reached = operators.calls_of(lambda: found.extend(torch.func.grad(loss, argnums=(0, 1, 2))(*x)))
    assert [func for func, _ in reached] == [*FORWARD, operator.BACKWARD]
    for ours, theirs in zip(found, torch.autograd.grad(loss(*recorded), recorded), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_vmap():
    x = [torch.stack([t, 2 * t, t.flip(2)]) for t in tensors(40)]
    for function in (loss, torch.func.grad(loss)):
        torch.testing.assert_close(torch.func.vmap(function)(*x), torch.stack([function(*t) for t in zip(*x, strict=True)]))


def test_inference_mode_and_autocast():
    expected = attend(*tensors())
    with torch.inference_mode(), dispatch.recorded() as choices:
        torch.testing.assert_close(attend(*tensors()), expected)
    assert [str(choice) for choice in choices] == ["subquad::clustered_assign: native", "subquad::clustered_forward: native"]
    with torch.autocast("cpu", torch.bfloat16), dispatch.recorded() as choices:
        assert attend(*tensors(dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert all(choice.is_native for choice in choices)


def test_forward_mode_derivatives_run_in_pytorch():
    q, k, v = tensors()
    with dispatch.recorded() as choices:
        _, found = torch.func.jvp(lambda v: attend(q, k, v), (v,), (torch.ones_like(v),))
    assert choices[0].reasons == ("compiled kernels have no forward-mode derivatives",)
    torch.testing.assert_close(found, torch.ones_like(found))  # weights of sum 1


def test_exported_and_run_in_another_process(tmp_path):
    module = sq.Attention(dim=12, heads=3, method=MECHANISM).double().eval()
    x = torch.randn(2, 101, 12, dtype=torch.float64)
    torch.testing.assert_close(operators.exported(module, x, FORWARD, tmp_path), module(x))


@pytest.mark.parametrize(
    "name", ["real", "query", "key", "value", "assignment", "mask", "grad", "rest", "mass", "level", "total", "top"]
)
def test_tensors_that_do_not_fit_are_refused(name):
    operators.assert_refused(calls("padded"), name)


def test_numbers_that_do_not_fit_are_refused():
    """Clusters and keys that are not there: the kernel would write elsewhere."""
    (assign, coded), (forward, given), (backward, saved) = calls()
    with pytest.raises(sq.InputError, match="k-means needs clusters and bits; got clusters=0"):
        assign(*coded[:2], 0, 1)
    for wrong in (-1, 9):
        with pytest.raises(sq.InputError, match="assignment must be in 0 to 8"):
            forward(*given[:3], torch.full_like(given[3], wrong), *given[4:])
        with pytest.raises(sq.InputError, match="top must be in -1 to 69"):
            backward(*saved[:11], torch.full_like(saved[11], wrong * 10 - 20), *saved[12:])
    with pytest.raises(sq.InputError, match=r"assignment must have the dtype torch\.int64"):
        forward(*given[:3], given[3].int(), *given[4:])
    with pytest.raises(sq.InputError, match="the number of key-value heads must divide"):
        forward(given[0][:, :3].contiguous(), *given[1:3], given[3][:, :3], *given[4:])


@pytest.mark.parametrize(("queries", "keys"), [(0, 70), (70, 0), (0, 0)])
@pytest.mark.parametrize("body", ["native", "pytorch"])
def test_operators_without_queries_or_keys(queries, keys, body):
    q, k, v = (x[:, :, :n].detach().requires_grad_() for x, n in zip(tensors(), (queries, keys, keys), strict=True))
    assignment = operator.ASSIGN(q.detach(), None, 9, 2)
    context = dispatch.disabled() if body == "pytorch" else torch.enable_grad()
    with context:
        out = operator.FORWARD(q, k, v, assignment.zero_(), None, None, 9, 5, 1.0)[0]
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.shape == (2, 4, queries, 3)
    assert all((x == 0).all() for x in (out, *grads))
