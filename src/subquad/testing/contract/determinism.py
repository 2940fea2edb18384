"""Point 11: what is random comes from the seed, lives in the state_dict, and is redrawn only on request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from subquad.attention import MechanismModule
from subquad.errors import OptionError, StateError
from subquad.families.base import Mechanism
from subquad.testing.cases import DIM, HEADS, VALUE_DIM, WIDTH, Case, inputs
from subquad.testing.contract.selection import Contract, requires


def build(mechanism: Mechanism) -> MechanismModule:
    """A new module, with its initial weights."""
    torch.manual_seed(0)
    module: MechanismModule = mechanism.build(heads=HEADS, head_dim=DIM, value_dim=VALUE_DIM, dim=WIDTH)
    return module.double().eval()


def with_seed(case: Case, seed: int) -> Mechanism:
    return replace(case.mechanism, seed=seed)  # type: ignore[type-var]


def draws(case: Case) -> str:
    return "" if case.info.random else f"{case.info.name} draws nothing"


def draws_nothing(case: Case) -> str:
    return f"{case.info.name} draws {case.info.random}" if case.info.random else ""


class Determinism(Contract):
    """11. Same seed, same bits."""

    @torch.no_grad()
    def test_same_seed_same_bits(self, case: Case) -> None:
        x = inputs(70)
        for is_causal in case.directions:
            first, second = (case.run(x, build(case.mechanism), is_causal=is_causal) for _ in range(2))
            assert torch.equal(first, second)

    @requires(functional=True)
    @torch.no_grad()
    def test_function_equals_module(self, case: Case) -> None:
        for dtype, built in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
            x = inputs(70, dtype=dtype)
            for is_causal in case.directions:
                found = case.function(x, is_causal=is_causal)
                assert torch.equal(found, case.run(x, case.build(dtype=built), is_causal=is_causal))

    @torch.no_grad()
    def test_buffers_are_saved_and_kept(self, case: Case) -> None:
        module = build(case.mechanism)
        before = {name: t.clone() for name, t in module.state_dict().items()}
        drawn = set(case.mechanism.buffers(module.sizes))
        assert set(before) == drawn | set(case.mechanism.parameters(module.sizes)) | ({"seed"} if drawn else set())
        assert bool(drawn) == bool(case.info.random)
        for training in (False, True):
            for is_causal in case.directions:
                case.run(inputs(9), module.train(training), is_causal=is_causal)
            kept = all(torch.equal(before[name], t) for name, t in module.state_dict().items())
            assert kept == (not training or not case.info.updates)

    @requires(draws)
    @torch.no_grad()
    def test_state_dict_carries_the_draw(self, case: Case) -> None:
        source = build(case.mechanism)
        target = build(with_seed(case, 77))
        x, is_causal = inputs(150), case.directions[-1]
        expected = case.run(x, source, is_causal=is_causal)
        assert not torch.equal(case.run(x, target, is_causal=is_causal), expected)
        target.load_state_dict(source.state_dict())
        assert torch.equal(case.run(x, target, is_causal=is_causal), expected)
        assert target.method == source.method

    @requires(draws_nothing)
    def test_redraw_without_a_draw_is_refused(self, case: Case) -> None:
        with pytest.raises(OptionError, match="draws nothing"):
            build(case.mechanism).redraw(3)

    @requires(draws)
    @torch.no_grad()
    def test_redraw(self, case: Case) -> None:
        module = build(case.mechanism)
        before = {name: t.clone() for name, t in module.named_buffers()}
        module.redraw(3)
        fresh = {**with_seed(case, 3).buffers(module.sizes), "seed": torch.tensor(3)}
        for name, t in module.named_buffers():
            assert not torch.equal(t, before[name])
            assert torch.equal(t, fresh[name])

    @requires(draws, decode=True)
    def test_redraw_ends_old_states(self, case: Case) -> None:
        module = build(case.mechanism)
        _, state = case.run(inputs(5), module, is_causal=True, return_state=True)
        module.redraw(4)
        with pytest.raises(StateError, match="method that made it"):
            case.run(inputs(5), module, is_causal=True, state=state)
        _, state = case.run(inputs(5), module, is_causal=True, return_state=True)
        loaded = build(case.mechanism)
        loaded.load_state_dict(module.state_dict())
        expected = case.run(inputs(5), module, is_causal=True, state=state)
        assert torch.equal(case.run(inputs(5), loaded, is_causal=True, state=state), expected)
