"""PyTorch negates some views only when they are read, such as `z.conj().imag`. Their results are those of ordinary tensors."""

import pytest
import torch

import subquad as sq
from tests.harness import Inputs, every_case, inputs


def lazy(x):
    """The same numbers, negated when they are read."""
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg()
    return view


def run(case, x, module=None):
    """The output in the last direction, and the gradients of query, key and value."""
    x = x.map(lambda t: t.detach().requires_grad_())
    out = case.run(x, module, is_causal=case.directions[-1])
    return [out, *torch.autograd.grad(out.square().sum(), [case.query(x), x.key, x.value])]


@every_case()
@pytest.mark.parametrize("name", ["query", "key", "value", "hidden", "all"])
def test_inputs(case, name):
    x = inputs(70)
    view = Inputs(*(lazy(t) if name in (field, "all") else t for field, t in vars(x).items()))
    assert all(map(torch.equal, run(case, view), run(case, x)))
    with torch.no_grad():
        assert torch.equal(*(case.run(t, is_causal=case.directions[-1]) for t in (view, x)))


@every_case()
def test_gradient_of_the_output(case):
    x = inputs(70, grad=True)
    out = case.run(x, is_causal=case.directions[-1])
    grad = torch.randn_like(out)
    wanted = [case.query(x), x.key, x.value]
    expected = torch.autograd.grad(out, wanted, grad, retain_graph=True)
    for view in (lazy(grad), torch._neg_view(-grad)):  # the second is contiguous
        assert all(map(torch.equal, torch.autograd.grad(out, wanted, view, retain_graph=True), expected))


@every_case()
@torch.no_grad()
def test_weights(case):
    x, module = inputs(70), case.mechanism.build(heads=3, head_dim=5, value_dim=7, dim=11).double().eval()
    expected = case.run(x, module, is_causal=case.directions[-1])
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(lazy(parameter)))
    for name, buffer in list(module.named_buffers()):
        if buffer.is_floating_point():
            setattr(module, name, lazy(buffer))
    assert torch.equal(case.run(x, module, is_causal=case.directions[-1]), expected)


@torch.no_grad()
def test_attn_mask():
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind(0)
    mask = torch.randn(9, 9)
    assert torch.equal(sq.attention(q, k, v, attn_mask=lazy(mask)), sq.attention(q, k, v, attn_mask=mask))


@every_case(decode=True)
@torch.no_grad()
def test_states(case):
    _, state = case.run(inputs(20), is_causal=True, return_state=True)
    saved = state.state_dict()
    saved["tensors"] = {name: lazy(t) if t.is_floating_point() else t for name, t in saved["tensors"].items()}
    loaded = sq.State.from_state_dict(saved)
    assert torch.equal(*(case.run(inputs(3), is_causal=True, state=s) for s in (loaded, state)))
    with pytest.raises(sq.StateError, match="must have no lazy views"):
        case.run(inputs(3), is_causal=True, state=sq.State(**saved))
