"""The operators of the convolution: `opcheck`, both bodies, and everything that traces, transforms or exports them."""

import pytest
import torch

import subquad as sq
from subquad.engines.convolution import add_convolved
from subquad.ops import convolution, dispatch
from tests.engines.test_native import needs_compiled
from tests.ops import operators

pytestmark = needs_compiled


def tensors(length=40, *, heads=4, kv_heads=2, taps=5, dtype=torch.float64, grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, length, 3), (2, kv_heads, length, 3), (heads, taps))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes]


def loss(*x):
    return add_convolved(*x).square().sum()


def calls(**options):
    x = tensors(grad=True, **options)
    return operators.calls_of(lambda: loss(*x).backward())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_opcheck(dtype):
    found = calls(dtype=dtype)
    assert [func for func, _ in found] == [convolution.FORWARD, convolution.BACKWARD]
    operators.check(found, [convolution.FORWARD])


@pytest.mark.parametrize("length", [1, 4, 40])
@pytest.mark.parametrize("taps", [1, 5, 33])
def test_both_bodies_give_the_same(length, taps):
    operators.assert_same_bodies(calls(length=length, taps=taps))


def test_the_base_stays_as_it_was():
    base, value, kernel = tensors()
    before = base.clone()
    with torch.no_grad():
        add_convolved(base, value, kernel)
    assert torch.equal(base, before)


def test_a_backward_pass_with_the_other_body():
    x = tensors(grad=True)
    operators.assert_same_gradients_of_both_bodies(convolution.FORWARD, x, x)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_compiled_once_for_all_lengths(grad):
    inputs = [tensors(length, grad=grad) for length in (40, 90, 131)]
    operators.assert_compiled_once(add_convolved, inputs, [convolution.FORWARD])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients(backend):
    operators.assert_same_compiled_gradients(loss, [tensors(length, grad=True) for length in (40, 71)], backend)


def test_second_derivatives():
    assert torch.autograd.gradgradcheck(add_convolved, tensors(7, grad=True))


def test_gradients_of_torch_func():
    x, recorded, found = tensors(), tensors(grad=True), []
    reached = operators.calls_of(lambda: found.extend(torch.func.grad(loss, argnums=(0, 1, 2))(*x)))
    assert [func for func, _ in reached] == [convolution.FORWARD, convolution.BACKWARD]
    for ours, theirs in zip(found, torch.autograd.grad(loss(*recorded), recorded), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_vmap():
    base, value, kernel = tensors()
    many = [torch.stack([t, 2 * t, t.flip(2)]) for t in (base, value)]
    found = torch.func.vmap(add_convolved, in_dims=(0, 0, None))(*many, kernel)
    torch.testing.assert_close(found, torch.stack([add_convolved(*t, kernel) for t in zip(*many, strict=True)]))
    grad = torch.func.grad(loss, argnums=2)
    torch.testing.assert_close(
        torch.func.vmap(grad, in_dims=(0, 0, None))(*many, kernel),
        torch.stack([grad(*t, kernel) for t in zip(*many, strict=True)]),
    )
    with pytest.raises(sq.UnsupportedError, match="cannot map over its weights"):
        torch.func.vmap(add_convolved, in_dims=(None, None, 0))(base, value, torch.stack([kernel, kernel]))


def test_inference_mode_and_autocast():
    expected = add_convolved(*tensors())
    with torch.inference_mode(), dispatch.recorded() as choices:
        torch.testing.assert_close(add_convolved(*tensors()), expected)
    assert [str(choice) for choice in choices] == ["subquad::convolution_forward: native"]
    module = sq.Nystrom(conv=5, landmarks=4).build(heads=4, kv_heads=2, head_dim=3).eval()
    x = [t.bfloat16() for t in (*tensors()[:2], tensors()[1])]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), dispatch.recorded() as choices:
        assert module(*x).dtype == torch.bfloat16
    assert [choice.operator for choice in choices if choice.is_native][-1] == "subquad::convolution_forward"


def test_exported_and_run_in_another_process(tmp_path):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = torch.nn.Parameter(torch.randn(1, 5, dtype=torch.float64))

        def forward(self, x):
            return add_convolved(x[:, None], x[:, None], self.kernel)[:, 0]

    layer, x = Layer().eval(), torch.randn(2, 101, 12, dtype=torch.float64)
    found = operators.exported(layer, x, [convolution.FORWARD], tmp_path)
    torch.testing.assert_close(found, layer(x))


@pytest.mark.parametrize("name", ["base", "value", "grad"])
def test_tensors_that_do_not_fit_are_refused(name):
    operators.assert_refused(calls(), name)


def test_kernels_that_do_not_fit_are_refused():
    base, value, kernel = tensors()
    for wrong in (kernel[:, :4], kernel[0]):
        with pytest.raises(sq.InputError, match="kernel must have 2 dimensions, and the second one an odd size"):
            convolution.FORWARD(base, value, wrong)
    with pytest.raises(sq.InputError, match="the number of key-value heads must divide"):
        convolution.FORWARD(base, value, kernel[:3])
    with pytest.raises(sq.InputError, match="base, value must have the same floating-point dtype"):
        convolution.FORWARD(base.float(), value, kernel)
