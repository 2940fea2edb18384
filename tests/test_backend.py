"""`sq.backend`: the operators and bodies of a call that is not made."""

import pytest
import torch

import subquad as sq
from subquad.ops import dispatch
from subquad.registry import resolve
from tests.engines.test_native import needs_compiled
from tests.harness import every_case, inputs


def tensors(length=70, *, kv_heads=3, grad=False):
    return [torch.randn(2, heads, length, 5, requires_grad=grad) for heads in (3, kv_heads, kv_heads)]


@needs_compiled
def test_operators_and_bodies():
    found = sq.backend(*tensors(), "linear", is_causal=True)
    assert found == sq.Backend("linear", (dispatch.Choice("subquad::kernelized_forward"),))
    assert found.is_native
    assert str(found) == "linear:\n  subquad::kernelized_forward: native"
    with pytest.raises(AttributeError):
        found.method = "another"


@needs_compiled
def test_training_has_the_operators_of_the_backward_pass():
    found = sq.backend(*tensors(grad=True), sq.Clustered(clusters=5))
    names = [choice.operator for choice in found.operators]
    assert names == ["subquad::clustered_assign", "subquad::clustered_forward", "subquad::clustered_backward"]
    with torch.no_grad():
        assert len(sq.backend(*tensors(grad=True), sq.Clustered(clusters=5)).operators) == 2


def test_why_not():
    with dispatch.disabled():
        found = sq.backend(*tensors(), "linear")
    assert not found.is_native
    assert "subquad::kernelized: pytorch (compiled kernels are turned off" in str(found)
    on_meta = sq.backend(*(x.to("meta") for x in tensors()), "linear")
    assert "the tensors are on 'meta'" in on_meta.operators[0].reasons[-1]


def test_without_operators():
    found = sq.backend(*tensors())
    assert found.operators == ()
    assert not found.is_native
    assert str(found) == "softmax: PyTorch's own operations; there are no compiled kernels for this call"


@needs_compiled
def test_modules_and_their_weights():
    module = sq.Nystrom(conv=3, landmarks=4).build(heads=3, head_dim=5)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    found = sq.backend(*tensors(grad=True), module)
    assert {"subquad::convolution_forward", "subquad::convolution_backward"} <= {c.operator for c in found.operators}
    assert module.training
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"method": "linea"}, sq.UnknownMethodError),
        ({"attn_mask": torch.ones(70, 70, dtype=torch.bool)}, sq.UnsupportedError),
        ({"key_padding_mask": torch.ones(2, 3, dtype=torch.bool)}, sq.InputError),
        ({"key_padding_mask": torch.ones(2, 70)}, sq.InputError),
        ({"return_state": True}, sq.InputError),
        ({"method": "rfa"}, sq.UnsupportedError),
        ({"key": torch.randn(2, 3, 69, 5)}, sq.InputError),
        ({"key": torch.randn(2, 1, 70, 5), "value": torch.randn(2, 1, 70, 5)}, sq.InputError),
        ({"key": [1.0]}, sq.InputError),
        ({"key": torch.eye(4).to_sparse()}, sq.InputError),
        ({"method": "reformer"}, sq.InputError),
        ({"state": "a state", "is_causal": True}, sq.StateError),
    ],
)
def test_the_errors_of_attention(change, error):
    arguments = {**dict(zip(("query", "key", "value"), tensors(), strict=True)), "method": "linear", **change}
    with pytest.raises(sq.SubquadError) as expected:
        sq.attention(**arguments)
    with pytest.raises(error) as found:
        sq.backend(**arguments)
    assert str(found.value) == str(expected.value)


def test_states():
    module = sq.Linear().build(heads=3, head_dim=5)
    x = tensors(4)
    _, state = module(*x, is_causal=True, return_state=True)
    before = {name: t.clone() for name, t in state.tensors.items()}
    found = sq.backend(*x, module, is_causal=True, state=state, return_state=True)
    assert all(torch.equal(state.tensors[name], t) for name, t in before.items())
    assert [c.operator.startswith("subquad::kernelized") for c in found.operators] == [True]
    with pytest.raises(sq.StateError):
        sq.backend(*x, "performer", is_causal=True, state=state)


def test_nothing_is_computed():
    q, k, v = (torch.empty(1).expand(1, 8, 2**20, 64) for _ in range(3))  # would take minutes and gigabytes
    assert sq.backend(q, k, v, "linear", is_causal=True).method == "linear"


@every_case()
def test_every_mechanism_can_be_asked(case):
    """And a real call afterwards is what it was."""
    x = inputs(70)
    module = case.build()
    is_causal = case.directions[-1]
    expected = case.run(x, module, is_causal=is_causal)
    options = {"hidden": x.hidden} if case.mechanism.reads_tokens else {}
    found = sq.backend(case.query(x), x.key, x.value, module, is_causal=is_causal, **options)
    assert found.method == case.mechanism.info.name
    assert torch.equal(case.run(x, module, is_causal=is_causal), expected)
    assert resolve(case.mechanism) == case.mechanism
