"""Contract 11: what is random comes from the seed, lives in the state_dict, and is redrawn only when asked."""

import dataclasses

import pytest
import torch

import subquad as sq
from tests.harness import DIM, HEADS, VALUE_DIM, WIDTH, every_case, inputs


def build(config):
    torch.manual_seed(0)
    return config.build(heads=HEADS, head_dim=DIM, value_dim=VALUE_DIM, dim=WIDTH).double().eval()


@every_case
@torch.no_grad()
def test_same_seed_same_bits(case):
    x = inputs(70)
    for is_causal in case.directions:
        first, second = (case.run(x, build(case.config), is_causal=is_causal) for _ in range(2))
        assert torch.equal(first, second)


@every_case
@torch.no_grad()
def test_function_equals_module(case):
    case.skip_unless(functional=True)
    for dtype, built in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        x = inputs(70, dtype=dtype)
        for is_causal in case.directions:
            found = case.function(x, is_causal=is_causal)
            assert torch.equal(found, case.run(x, case.build(dtype=built), is_causal=is_causal))


@every_case
@torch.no_grad()
def test_buffers_are_saved_and_kept(case):
    module = build(case.config)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    drawn = set(case.config.buffers(module.sizes))
    assert set(before) == drawn | set(case.config.parameters(module.sizes)) | ({"seed"} if drawn else set())
    assert bool(case.config.buffers(module.sizes)) == bool(case.info.random)
    for training in (False, True):
        for is_causal in case.directions:
            case.run(inputs(9), module.train(training), is_causal=is_causal)
        kept = all(torch.equal(before[name], t) for name, t in module.state_dict().items())
        assert kept == (not training or not case.info.updates)


@every_case
@torch.no_grad()
def test_state_dict_carries_the_draw(case):
    if not case.info.random:
        pytest.skip(f"{case.info.name} draws nothing")
    source = build(case.config)
    target = build(dataclasses.replace(case.config, seed=77))
    x, is_causal = inputs(150), case.directions[-1]
    expected = case.run(x, source, is_causal=is_causal)
    assert not torch.equal(case.run(x, target, is_causal=is_causal), expected)
    target.load_state_dict(source.state_dict())
    assert torch.equal(case.run(x, target, is_causal=is_causal), expected)
    assert target.config == source.config


@every_case
@torch.no_grad()
def test_redraw(case):
    module = build(case.config)
    if not case.info.random:
        with pytest.raises(sq.OptionError, match="draws nothing"):
            module.redraw(3)
        return
    before = {name: t.clone() for name, t in module.named_buffers()}
    module.redraw(3)
    fresh = {**dataclasses.replace(case.config, seed=3).buffers(module.sizes), "seed": torch.tensor(3)}
    for name, t in module.named_buffers():
        assert not torch.equal(t, before[name])
        assert torch.equal(t, fresh[name])


@every_case
def test_redraw_ends_old_states(case):
    if not case.info.random:
        pytest.skip(f"{case.info.name} draws nothing")
    case.skip_unless(decode=True)
    module = build(case.config)
    _, state = case.run(inputs(5), module, is_causal=True, return_state=True)
    module.redraw(4)
    with pytest.raises(sq.StateError, match="method that made it"):
        case.run(inputs(5), module, is_causal=True, state=state)
    _, state = case.run(inputs(5), module, is_causal=True, return_state=True)
    loaded = build(case.config)
    loaded.load_state_dict(module.state_dict())
    expected = case.run(inputs(5), module, is_causal=True, state=state)
    assert torch.equal(case.run(inputs(5), loaded, is_causal=True, state=state), expected)
