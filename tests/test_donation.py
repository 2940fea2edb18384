"""Donated states and prepared steps: what is overwritten, what is refused, and when a step must be prepared again."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

import subquad as sq
from subquad.engines import step
from subquad.ops import dispatch
from tests.engines.test_native import needs_compiled

KERNELIZED = [sq.Linear(), sq.Taylor(), sq.Plain(), sq.Efficient(), sq.Performer(features=24)]
ROWS = [sq.Local(window=5), sq.Longformer(window=4, num_global=2), sq.SparseStrided(stride=4), sq.SparseFixed(stride=4),
        sq.BigBird(block=4), sq.Pooled(stride=3, window=4), sq.Routing(clusters=3, chunk=4), sq.Softmax()]  # fmt: skip


def tokens(length=1, *, batch=2, heads=4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, length, 16, generator=generator).to(dtype) for _ in range(3)]


def attend(x, method, state=None, **options):
    return sq.attention(*x, method, is_causal=True, state=state, return_state=True, **options)


def decoding(method, length=9, **sizes):
    """A state that a step has made."""
    _, state = attend(tokens(length, **sizes), method)
    return attend(tokens(seed=1, **sizes), method, state)[1]


def memory(state):
    return {name: (t if isinstance(t, torch.Tensor) else t.buffer).data_ptr() for name, t in state.tensors.items()}


@needs_compiled
@pytest.mark.parametrize("method", KERNELIZED, ids=str)
@torch.no_grad()
def test_sums_are_overwritten(method):
    state = decoding(method)
    before = memory(state)
    _, new = attend(tokens(seed=2), method, state.donate())
    assert memory(new) == before


@needs_compiled
@pytest.mark.parametrize("method", [*KERNELIZED, *ROWS], ids=str)
@torch.no_grad()
def test_without_donation_nothing_is_overwritten(method):
    state = decoding(method)
    before = state.state_dict()["tensors"]
    for _ in range(3):
        attend(tokens(seed=2), method, state)
    after = state.state_dict()["tensors"]
    assert all(torch.equal(before[name], after[name]) for name in before)


@needs_compiled
@torch.no_grad()
def test_a_state_that_shares_memory_with_a_prompt_is_copied_first():
    _, prompt = attend(tokens(9), "linear")
    before = prompt.state_dict()["tensors"]["S"]
    held = prompt.tensors["S"]
    _, state = attend(tokens(seed=1), "linear", prompt.donate())
    assert torch.equal(held, before)  # somebody may still hold the tensor of a state that no step has made
    assert state.tensors["S"].data_ptr() != held.data_ptr()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("method", [sq.Linear(), sq.Local(window=5), sq.Softmax()], ids=str)
@torch.no_grad()
def test_a_used_state_says_so(method, native):
    with nothing() if native else dispatch.disabled():
        state = decoding(method)
        donated = state.donate()
        attend(tokens(seed=2), method, donated)
        for used in (state, donated):
            for use in (
                lambda s: attend(tokens(), method, s),
                lambda s: attend(tokens(3), method, s),
                lambda s: s.donate(),
                lambda s: s.clone(),
                lambda s: s.reorder(torch.tensor([0])),
                lambda s: s.state_dict(),
                lambda s: s.batch,
                lambda s: s.nbytes,
                lambda s: dict(s.tensors),
                pickle.dumps,
            ):
                with pytest.raises(sq.StateError, match="this state was donated to a call that has overwritten its memory"):
                    use(used)


def nothing():
    return torch.no_grad()


@torch.no_grad()
def test_views_of_a_donated_state_are_used_up_with_it():
    state = decoding("linear")
    views, copies = [state.detach(), state.to("cpu"), copy.copy(state)], [state.clone(), copy.deepcopy(state)]
    expected = state.state_dict()["tensors"]["S"]
    attend(tokens(seed=2), "linear", state.donate())
    for view in views:
        with pytest.raises(sq.StateError, match="was donated"):
            attend(tokens(), "linear", view)
    assert all(torch.equal(kept.tensors["S"], expected) for kept in copies)


REFUSED = {
    "another batch": lambda: (tokens(batch=3), {}),
    "another precision": lambda: (tokens(dtype=torch.float64), {}),
    "a scale": lambda: (tokens(), {"scale": 2.0}),
    "a mask": lambda: (tokens(), {"attn_mask": torch.ones(1, 1, dtype=torch.bool)}),
    "a flag": lambda: (tokens(), {"enable_gqa": 1}),
    "dropout": lambda: (tokens(), {"dropout_p": 0.5}),
    "padding": lambda: (tokens(), {"key_padding_mask": torch.ones(2, 2, dtype=torch.bool)}),
}


@pytest.mark.parametrize("case", REFUSED)
@torch.no_grad()
def test_a_refused_call_leaves_a_donated_state_usable(case):
    state = decoding("linear")
    donated, before = state.donate(), state.state_dict()["tensors"]["S"]
    x, options = REFUSED[case]()
    with pytest.raises(sq.SubquadError) as error:
        attend(x, "linear", donated, **options)
    with pytest.raises(sq.SubquadError) as usual:
        attend(x, "linear", sq.State.from_state_dict(state.state_dict()), **options)
    assert str(error.value) == str(usual.value)
    assert torch.equal(state.tensors["S"], before)
    attend(tokens(), "linear", donated)


@torch.no_grad()
def test_donation_with_gradients_copies():
    """The state of a step may be saved for a backward pass."""
    state = decoding("linear")
    held, before = state.tensors["S"], state.state_dict()["tensors"]["S"]
    x = [t.requires_grad_() for t in tokens(seed=2)]
    with torch.enable_grad():
        out, new = attend(x, "linear", state.donate())
        out.square().sum().backward()
    assert torch.equal(held, before)
    assert new.tensors["S"].requires_grad
    with pytest.raises(sq.StateError, match="was donated"):
        state.clone()


def test_of_threads_that_continue_a_donated_state_one_succeeds():
    threads = 8
    start = Barrier(threads)
    with torch.no_grad(), ThreadPoolExecutor(threads) as pool:
        for _ in range(20):
            state = decoding("linear")
            donated, expected = state.donate(), attend(tokens(seed=2), "linear", state.clone())[0]

            def run(_, donated=donated):
                start.wait()
                try:
                    return attend(tokens(seed=2), "linear", donated)[0]
                except sq.StateError:
                    return None

            found = [out for out in pool.map(run, range(threads)) if out is not None]
            assert len(found) == 1
            assert torch.allclose(found[0], expected)


@needs_compiled
@pytest.mark.parametrize("method", [sq.Linear(), sq.Local(window=5), sq.Routing(clusters=3, chunk=4)], ids=str)
@torch.no_grad()
def test_a_prepared_step_is_used_for_calls_like_the_first_only(method, monkeypatch):
    used = []
    run = step.PreparedStep.run
    monkeypatch.setattr(step.PreparedStep, "run", lambda self, *x: used.append(self) or run(self, *x))
    state = decoding(method)
    x = tokens(seed=3)
    expected, _ = attend(x, method, sq.State.from_state_dict(state.state_dict()))
    used.clear()
    for given in (x, [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x], [t.double().float() for t in x]):
        assert torch.allclose(attend(given, method, state)[0], expected)
    strided = [torch.stack([t, t], dim=-1)[..., 0] for t in x]
    assert torch.allclose(attend(strided, method, state)[0], expected, atol=1e-6)
    lazy = [torch.complex(torch.zeros_like(t), -t).conj().imag for t in x]
    assert lazy[0].is_neg()
    assert torch.allclose(attend(lazy, method, state)[0], expected, atol=1e-6)
    with dispatch.disabled():
        count = len(used)
        assert torch.allclose(attend(x, method, state)[0], expected, atol=1e-5)
        assert len(used) == count


@needs_compiled
@torch.no_grad()
def test_a_step_sees_that_weights_have_changed():
    module = sq.Performer(features=24).build(heads=4, head_dim=16).eval()
    x = tokens(seed=3)

    def run(state):
        return module(*x, is_causal=True, state=state, return_state=True)

    _, state = module(*tokens(9), is_causal=True, return_state=True)
    _, state = run(state)
    before, _ = run(state)
    module.projection.mul_(1.5)
    after, _ = run(state)
    assert not torch.allclose(before, after)
    assert torch.equal(after, run(sq.State.from_state_dict(state.state_dict()))[0])
    with torch.enable_grad():
        rfa = sq.RFA(features=8).build(heads=4, head_dim=16)
        _, state = rfa(*tokens(9), is_causal=True, return_state=True)
        out, _ = rfa(*x, is_causal=True, state=state, return_state=True)
        assert out.requires_grad


@torch.no_grad()
def test_steps_in_half_precision():
    for method in (sq.Linear(), sq.Performer(features=24), sq.Local(window=5)):
        whole = tokens(12, dtype=torch.bfloat16)
        expected = sq.attention(*whole, method, is_causal=True)
        _, state = attend([t[:, :, :6] for t in whole], method)
        for i in range(6, 12):
            out, state = attend([t[:, :, i : i + 1] for t in whole], method, state.donate())
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out, expected[:, :, i : i + 1], rtol=0.03, atol=0.03)


@pytest.mark.parametrize("method", [sq.Linear(), sq.Local(window=5), sq.Reformer(buckets=4, chunk=4)], ids=str)
@torch.no_grad()
def test_attention_layers_with_rotary_positions(method):
    layer = sq.Attention(32, 4, method, rotary=10000.0).eval()
    x = torch.randn(2, 12, 32)
    whole = layer(x, is_causal=True)
    _, state = layer(x[:, :6], is_causal=True, return_state=True)
    for i in range(6, 12):
        before = state
        out, state = layer(x[:, i : i + 1], is_causal=True, state=state.donate(), return_state=True)
        torch.testing.assert_close(out, whole[:, i : i + 1], rtol=1e-4, atol=1e-5)
        with pytest.raises(sq.StateError, match="was donated"):
            layer(x[:, :1], is_causal=True, state=before, return_state=True)


@torch.no_grad()
def test_a_state_of_no_new_tokens_shares_nothing():
    state = decoding("linear")
    _, same = attend(tokens(0), "linear", state)
    assert memory(same) != memory(state)
