"""A state that no call has returned is checked before it is continued: whatever does not fit is a `StateError`."""

import contextlib
import copy
import dataclasses
import pickle
from types import MappingProxyType

import pytest
import torch

import subquad as sq
from tests.harness import Case, Largest, every_case, inputs

SEEN = 20


def saved_state(case, length=SEEN):
    with torch.no_grad():
        return case.run(inputs(length), is_causal=True, return_state=True)[1].state_dict()


def go_on(case, state):
    with torch.no_grad():
        return case.run(inputs(3, seed=2), is_causal=True, state=state, return_state=True)


def refused(case, saved):
    """Whether it is refused, when it is read or at the latest when it is continued."""
    with pytest.raises(sq.StateError) as caught:
        go_on(case, sq.State.from_state_dict(saved))
    return "; got" in str(caught.value)


def with_tensor(saved, name, tensor):
    return {**saved, "tensors": {**saved["tensors"], name: tensor}}


DAMAGE = {
    "cut in its rows": lambda t: t[..., :-1, :] if t.dim() > 2 else t[:1],
    "cut in its channels": lambda t: t[..., :-1] if t.dim() > 1 else t[:1],
    "one row and channel of one head": lambda t: t[:, :1, :1, :1] if t.dim() > 2 else t[:1],
    "one row more": lambda t: torch.cat([t, t[..., :1, :]], -2) if t.dim() > 2 else torch.cat([t, t]),
    "another dimension": lambda t: t.unsqueeze(1),
    "no dimensions": lambda t: t.new_zeros(()),
    "another batch": lambda t: torch.cat([t, t]),
    "another precision": lambda t: t.half() if t.is_floating_point() else t.int(),
    "complex": lambda t: t.to(torch.complex64),
    "another device": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
}


def kind(tensor):
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


@every_case(decode=True)
def test_a_damaged_tensor(case):
    saved = saved_state(case)
    for name, tensor in saved["tensors"].items():
        for damage in DAMAGE.values():
            damaged = damage(tensor)
            if kind(damaged) != kind(tensor):  # there is something to cut
                assert refused(case, with_tensor(saved, name, damaged))


@every_case(decode=True)
def test_missing_and_unknown_tensors(case):
    saved = saved_state(case)
    for name in saved["tensors"]:
        assert refused(case, {**saved, "tensors": {n: t for n, t in saved["tensors"].items() if n != name}})
    assert refused(case, with_tensor(saved, "more", torch.zeros(2, 3)))
    assert refused(case, with_tensor(saved, 3, torch.zeros(2, 3)))


@every_case(decode=True)
def test_numbers_that_count_tokens(case):
    saved = saved_state(case)
    for name, tensor in saved["tensors"].items():
        for number in (-2, SEEN + 1, 2**62, -(2**63)) if tensor.dtype == torch.int64 else ():
            damaged = tensor.clone()
            damaged.view(-1)[-1] = number
            assert refused(case, with_tensor(saved, name, damaged))


def test_the_count_of_plain():
    case = Case(sq.Plain())
    saved = saved_state(case)
    for number in (-1.0, SEEN + 1.0, float("nan"), float("inf")):
        assert refused(case, with_tensor(saved, "count", torch.full_like(saved["tensors"]["count"], number)))


FIELDS = {
    "method": (None, 3, b"Linear()", "Linear"),
    "kv_heads": (0, -1, 2.0, True, "3", 2**31, None),
    "head_dim": (0, "abc", 10**400, 4),
    "value_dim": (0, [5], 8),
    "dtype": ("float32", None, torch.int64, torch.complex64, torch.float32),
    "length": (-5, 2**62, 10**400, "abc", True, 20.0, None, torch.tensor(20)),
    "tensors": ({}, None, [torch.zeros(2)], {"S": 1.0}, {"S": None}),
}


@every_case(decode=True)
def test_other_fields(case):
    saved = saved_state(case)
    for name, values in FIELDS.items():
        for value in values:
            assert refused(case, {**saved, name: value})


@every_case(decode=True)
def test_a_length_that_the_tensors_do_not_show(case):
    saved = saved_state(case)
    with Largest() as largest, contextlib.suppress(sq.StateError):
        go_on(case, sq.State.from_state_dict({**saved, "length": 2**22}))
    assert largest.numel < 2**19


def test_a_length_that_the_rows_of_hybrid_do_not_show():
    case = Case(sq.Hybrid(window=2**31 - 1))
    assert refused(case, {**saved_state(case), "length": 2**22})


@every_case(decode=True)
def test_a_state_changed_by_hand(case):
    state = go_on(case, None)[1]
    with pytest.raises(TypeError):
        state.tensors["more"] = torch.zeros(2)
    for name in state.tensors:
        others = {n: t for n, t in state.tensors.items() if n != name}
        for changed in (
            dataclasses.replace(state, tensors=others),
            dataclasses.replace(sq.State.from_state_dict(state.state_dict()), tensors=others),
        ):
            with pytest.raises(sq.StateError):
                go_on(case, changed)
    with pytest.raises(sq.StateError):
        go_on(case, dataclasses.replace(state, length=-1))


def test_a_dictionary_that_is_changed_later():
    case = Case(sq.Linear())
    saved = saved_state(case)
    for own in (dict(saved["tensors"]), MappingProxyType(mutable := dict(saved["tensors"]))):
        state = sq.State(**{**saved, "tensors": own})
        expected, _ = go_on(case, state)
        (mutable if isinstance(own, MappingProxyType) else own)["S"] = torch.zeros(1)
        assert torch.equal(go_on(case, state)[0], expected)


def test_a_tensor_that_is_resized_in_place():
    case = Case(sq.Linear())
    state = sq.State.from_state_dict(saved_state(case))
    go_on(case, state)
    state.tensors["S"].resize_(2, 1, 1, 1)
    with pytest.raises(sq.StateError, match=r"got \{'S': \(2, 1, 1, 1\)\}"):
        go_on(case, state)


@every_case(decode=True)
def test_numbers_changed_in_place_do_no_harm(case):
    for number in (-(2**63), -7, 2**31, 2**63 - 1):
        _, state = go_on(case, None)
        for held in state.tensors.values():
            tensor = held if isinstance(held, torch.Tensor) else held.rows
            if tensor.dtype == torch.int64:
                tensor.fill_(number)
        _, state = go_on(case, state)
        for _ in range(60):
            _, state = go_on(case, state)


@every_case(decode=True)
def test_copies_of_a_state_continue(case):
    _, state = go_on(case, None)
    expected, _ = go_on(case, state)
    for again in (copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), sq.State.clone, dataclasses.replace):
        assert torch.equal(go_on(case, again(state))[0], expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {n: x for n, x in t.items() if n != "position"},
        lambda t: {n: x for n, x in t.items() if n == "position"},
        lambda t: {**t, "position": t["position"].float()},
        lambda t: {**t, "position": t["position"] + 10},
        lambda t: {**t, "position": t["position"][:, None]},
        lambda t: {**t, "S": t["S"][:, :1, :1, :1]},
    ],
)
def test_positions_of_a_layer(change):
    layer, x = sq.Attention(8, 2, "linear", rotary=1e4), torch.randn(2, 5, 8)
    _, state = layer(x, is_causal=True, return_state=True)
    saved = state.state_dict()
    layer(x, is_causal=True, state=sq.State.from_state_dict(saved))
    with pytest.raises(sq.StateError):
        layer(x, is_causal=True, state=sq.State.from_state_dict({**saved, "tensors": change(saved["tensors"])}))


def test_returned_states_are_not_checked_again(monkeypatch):
    def fail(*_):
        raise AssertionError("checked again")

    layer, x = sq.Attention(8, 2, "linear", rotary=1e4), torch.randn(2, 5, 8)
    _, state = layer(x, is_causal=True, return_state=True)
    monkeypatch.setattr("subquad.engines.state_spec.check", fail)
    _, state = layer(x[:, :1], is_causal=True, state=state.reorder(torch.tensor([1, 0])), return_state=True)
    layer(x[:, :1], is_causal=True, state=state)
    with pytest.raises(AssertionError, match="checked again"):
        layer(x[:, :1], is_causal=True, state=dataclasses.replace(state))
