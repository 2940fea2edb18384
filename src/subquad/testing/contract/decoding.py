"""Point 8: parallel = chunked = one step at a time; a state can be cloned, rolled back, re-ordered, saved and donated."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from subquad.errors import StateError, SubquadError
from subquad.state import State
from subquad.testing.assertions import assert_close
from subquad.testing.cases import Case, Inputs, inputs
from subquad.testing.contract.selection import Contract, requires

TOKENS = 150
PIECES = {
    "one at a time": [1] * TOKENS,
    "odd pieces": [1, 2, 7, 63, 64, 13],
    "a prompt, then one at a time": [130] + [1] * 20,
    "two": [64, 86],
}
every_way = pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)


def feed(
    case: Case,
    x: Inputs,
    pieces: Sequence[int],
    state: State | None = None,
    real: Tensor | None = None,
    *,
    donate: bool = False,
) -> tuple[Tensor, State]:
    """Outputs and the last state, fed in `pieces`; with `donate`, each call may overwrite the state that it continues."""
    outs, start = [], 0
    for length in pieces:
        end = start + length
        mask = None if real is None else real[:, start:end]
        before = state.donate() if donate and state is not None else state
        out, state = case.run(x.tokens(start, end), is_causal=True, state=before, return_state=True, key_padding_mask=mask)
        outs.append(out)
        start = end
    assert state is not None
    return torch.cat(outs, dim=2), state


class Decoding(Contract):
    """8. Any pieces equal the whole."""

    @requires(decode=True)
    @every_way
    @pytest.mark.parametrize("grad", [False, True])
    def test_pieces_equal_the_whole(self, case: Case, pieces: list[int], grad: bool) -> None:
        x = inputs(TOKENS, grad=grad)
        found, state = feed(case, x, pieces)
        assert state.length == TOKENS
        assert_close(found, case.run(x, is_causal=True))

    @requires(decode=True, key_padding_mask=True)
    @every_way
    @torch.no_grad()
    def test_padded_pieces_equal_the_whole(self, case: Case, pieces: list[int]) -> None:
        x = inputs(TOKENS)
        real = torch.ones(2, TOKENS, dtype=torch.bool)
        real[0, :70] = False
        found, _ = feed(case, x, pieces, real=real)
        assert_close(found, case.run(x, is_causal=True, key_padding_mask=real))

    @requires(decode=True)
    @every_way
    @pytest.mark.parametrize("grad", [False, True])
    def test_donated_states_equal_the_whole(self, case: Case, pieces: list[int], grad: bool) -> None:
        x = inputs(TOKENS, grad=grad)
        with torch.set_grad_enabled(grad):
            found, _ = feed(case, x, pieces, donate=True)
            expected = case.run(x, is_causal=True)
        assert_close(found, expected)
        if grad:
            ours, theirs = (torch.autograd.grad(out.square().sum(), x.value)[0] for out in (found, expected))
            assert_close(ours, theirs)

    @requires(decode=True, key_padding_mask=True)
    @torch.no_grad()
    def test_donated_states_with_pads(self, case: Case) -> None:
        x, real = inputs(40), torch.ones(2, 40, dtype=torch.bool)
        real[0, :9] = False
        _, state = feed(case, x.tokens(0, 20), [20], real=real[:, :20])
        found, _ = feed(case, x.tokens(20, 40), [1] * 20, state, donate=True)
        assert_close(found, case.run(x, is_causal=True, key_padding_mask=real)[:, :, 20:])

    @requires(decode=True, key_padding_mask=True)
    @torch.no_grad()
    def test_mask_only_on_the_prompt(self, case: Case) -> None:
        x = inputs(30)
        real = torch.ones(2, 30, dtype=torch.bool)
        real[0, :9] = False
        _, state = feed(case, x.tokens(0, 20), [20], real=real[:, :20])
        found, _ = feed(case, x.tokens(20, 30), [1] * 10, state)
        assert_close(found, case.run(x, is_causal=True, key_padding_mask=real)[:, :, 20:])
        _, state = feed(case, x.tokens(0, 5), [5])
        real[:, :5], real[:, 5:12] = True, False
        found, _ = feed(case, x.tokens(5, 30), [7, 18], state, real[:, 5:])
        assert_close(found, case.run(x, is_causal=True, key_padding_mask=real)[:, :, 5:])

    @requires(decode=True, attn_mask=True)
    @torch.no_grad()
    def test_attn_mask_counts_the_keys_in_the_state(self, case: Case) -> None:
        x, mask, state = inputs(30), torch.rand(30, 30) < 0.7, None
        whole = case.run(x, is_causal=True, attn_mask=mask)
        for start, end in ((0, 20), (20, 21), (21, 30)):
            piece = x.tokens(start, end)
            out, state = case.run(piece, is_causal=True, attn_mask=mask[start:end, :end], state=state, return_state=True)
            assert_close(out, whole[:, :, start:end])

    @requires(decode=True)
    def test_gradients_flow_through_the_state(self, case: Case) -> None:
        x = inputs(80, grad=True)
        outs = (feed(case, x, [30, 50])[0], case.run(x, is_causal=True))
        found, expected = (torch.autograd.grad(out.square().sum(), x.value)[0] for out in outs)
        assert_close(found, expected)


class States(Contract):
    """8. What can be done with a state, and its size."""

    @requires(decode=True)
    @torch.no_grad()
    def test_roll_back(self, case: Case) -> None:
        x, other = inputs(40), inputs(40, seed=9)
        _, state = feed(case, x.tokens(0, 20), [13] + [1] * 7)
        feed(case, other, [1, 5, 1], state)
        feed(case, other, [17], state)
        found, _ = feed(case, x.tokens(20, 40), [1] * 20, state)
        assert_close(found, case.run(x, is_causal=True)[:, :, 20:])

    @requires(decode=True)
    @torch.no_grad()
    def test_a_call_leaves_its_state_unchanged(self, case: Case) -> None:
        x = inputs(30)
        _, state = feed(case, x, [10, 1])
        before = state.state_dict()
        feed(case, x, [1, 4], state)
        bad = Inputs(x.query[:, :, :1], x.key[:, :, :2], x.value[:, :, :2], x.hidden[:, :2])
        with pytest.raises(SubquadError):
            case.run(bad, is_causal=True, state=state)
        after = state.state_dict()
        assert before["tensors"]
        assert all(torch.equal(before["tensors"][name], after["tensors"][name]) for name in before["tensors"])

    @requires(decode=True)
    @torch.no_grad()
    def test_a_donated_state_changes_no_other(self, case: Case) -> None:
        """Whatever is donated later, a state that is not can be continued."""
        x, other = inputs(40), inputs(40, seed=9)
        _, state = feed(case, x.tokens(0, 20), [13] + [1] * 7)
        copy = state.clone()
        _, later = feed(case, other.tokens(0, 2), [1, 1], state)
        feed(case, other.tokens(2, 40), [1] * 38, later, donate=True)
        for kept in (state, copy):
            found, _ = feed(case, x.tokens(20, 40), [1] * 20, kept)
            assert_close(found, case.run(x, is_causal=True)[:, :, 20:])

    @requires(decode=True)
    @torch.no_grad()
    def test_a_donated_state_is_used_once(self, case: Case) -> None:
        x = inputs(30)
        _, state = feed(case, x.tokens(0, 20), [18, 1, 1])
        bad = Inputs(x.query[:, :, :1], x.key[:, :, :2], x.value[:, :, :2], x.hidden[:, :2])
        donated = state.donate()
        with pytest.raises(SubquadError):
            case.run(bad, is_causal=True, state=donated)
        found, _ = feed(case, x.tokens(20, 30), [1] * 10, donated, donate=True)
        assert_close(found, case.run(x, is_causal=True)[:, :, 20:])
        for used in (state, donated):
            with pytest.raises(StateError, match="was donated"):
                case.run(x.tokens(20, 21), is_causal=True, state=used, return_state=True)

    @requires(decode=True)
    @torch.no_grad()
    def test_clone_shares_nothing(self, case: Case) -> None:
        x = inputs(30)
        _, state = feed(case, x.tokens(0, 20), [20])
        copy = state.clone()
        for part in state.tensors.values():
            (part if isinstance(part, torch.Tensor) else part.rows).fill_(3)
        found, _ = feed(case, x.tokens(20, 30), [10], copy)
        assert_close(found, case.run(x, is_causal=True)[:, :, 20:])

    @requires(decode=True)
    @torch.no_grad()
    def test_reorder(self, case: Case) -> None:
        x, index = inputs(30), torch.tensor([1, 0, 1])
        _, state = feed(case, x.tokens(0, 20), [20])
        beams = x.map(lambda t: t[index])
        found, _ = feed(case, beams.tokens(20, 30), [1, 9], state.reorder(index))
        assert_close(found, case.run(beams, is_causal=True)[:, :, 20:])

    @requires(decode=True)
    @torch.no_grad()
    def test_saved_and_loaded(self, case: Case) -> None:
        x = inputs(30)
        _, state = feed(case, x.tokens(0, 20), [20])
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
        file.seek(0)
        loaded = State.from_state_dict(torch.load(file, weights_only=True))
        found, _ = feed(case, x.tokens(20, 30), [1] * 10, loaded)
        assert torch.equal(found, feed(case, x.tokens(20, 30), [1] * 10, state)[0])

    @requires(decode=True)
    @torch.no_grad()
    def test_size_is_bounded_or_the_record_says_that_it_grows(self, case: Case) -> None:
        x, state, sizes = inputs(4000, batch=1), None, []
        for start in range(0, 4000, 50):
            _, state = case.run(x.tokens(start, start + 50), is_causal=True, state=state, return_state=True)
            assert state is not None
            sizes.append(state.nbytes)
        assert sizes[0] > 0
        early, late = max(sizes[:40]), max(sizes[40:])
        assert (late > 1.2 * early) == case.info.state_grows
