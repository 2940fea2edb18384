import pytest
import torch

import subquad as sq
from subquad.ops.sparse import random_draw
from subquad.ops.sparse.random_draw import _mix, draw_blocks, head_keys, reservoir_samples, running_samples
from tests.harness import DIM, HEADS, VALUE_DIM, Case, assert_close, inputs

HEAVY = 6.0  # standard deviations


def draws(blocks, count, *, keys=None, first=1, last=1, side=1):
    """What each block of queries draws, in each head: (heads, blocks, count)."""
    keys = head_keys(3, 0) if keys is None else keys
    return draw_blocks(keys[:, None], torch.arange(blocks), torch.tensor(blocks), count, first=first, last=last, side=side)


def weights_of(mechanism, length, **options):
    """The attention weights, with equal scores: (H, N, N)."""
    x = torch.zeros(1, HEADS, length, DIM, dtype=torch.float64)
    return sq.attention(x, x, torch.eye(length).double().expand(1, HEADS, -1, -1), mechanism, **options)[0]


def assert_uniform(counts, trials, expected):
    """`counts` of events with probability `expected` each, in `trials`."""
    deviation = (trials * expected * (1 - expected)) ** 0.5
    assert ((counts - trials * expected).abs() <= HEAVY * deviation).all()
    # All of them together: a mean squared deviation of about 1.
    assert (((counts - trials * expected) / deviation) ** 2).mean() < 2.5


def test_draws_differ_between_heads_and_seeds():
    one = draws(40, 3)
    assert not any(torch.equal(one[a], one[b]) for a in range(3) for b in range(a))
    other = draws(40, 3, keys=head_keys(3, 1))
    assert not any(torch.equal(a, b) for a in one for b in other)
    assert len(head_keys(1000, 0).unique()) == 1000
    assert torch.equal(head_keys(5, 7)[:3], head_keys(3, 7))
    causal = reservoir_samples(head_keys(3, 0), 3, 200)
    assert not any(torch.equal(causal[a], causal[b]) for a in range(3) for b in range(a))
    assert not torch.equal(causal, reservoir_samples(head_keys(3, 1), 3, 200))


@torch.no_grad()
def test_heads_and_seeds_see_different_keys():
    for is_causal in (False, True):
        first, second = (weights_of(sq.BigBird(block=2, window=1, seed=seed), 60, is_causal=is_causal) for seed in (0, 1))
        assert not any(torch.equal(first[a], first[b]) for a in range(HEADS) for b in range(a))
        assert not torch.equal(first, second)
        assert torch.equal(first, weights_of(sq.BigBird(block=2, window=1), 60, is_causal=is_causal))


@pytest.mark.parametrize(
    ("first", "last", "side", "count"), [(1, 1, 1, 3), (0, 0, 0, 1), (2, 1, 2, 4), (0, 2, 1, 20), (3, 0, 0, 2)]
)
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 12, 40])
def test_draws_avoid_the_window_and_the_global_blocks_and_each_other(first, last, side, count, blocks):
    found = draws(blocks, count, keys=head_keys(50, 3), first=first, last=last, side=side)
    for block in range(blocks):
        rest = [m for m in range(first, blocks - last) if abs(m - block) > side]
        for head in found[:, block].tolist():
            chosen = [m for m in head if m >= 0]
            assert len(chosen) == len(set(chosen)) == min(count, len(rest))
            assert set(chosen) <= set(rest)


@pytest.mark.parametrize(("first", "last", "side", "count"), [(1, 1, 1, 3), (0, 0, 0, 1), (2, 1, 2, 4)])
@pytest.mark.parametrize("block", [0, 5, 11, 19])
def test_every_allowed_block_is_drawn_equally_often(first, last, side, count, block):
    heads, blocks = 4000, 20
    found = draws(blocks, count, keys=head_keys(heads, 1), first=first, last=last, side=side)[:, block]
    allowed = [m for m in range(first, blocks - last) if abs(m - block) > side]
    counts = torch.bincount(found.flatten(), minlength=blocks)
    assert counts.sum() == counts[allowed].sum() == heads * count
    assert_uniform(counts[allowed].double(), heads, count / len(allowed))
    for place in found.unbind(-1):  # each draw by itself
        assert_uniform(torch.bincount(place, minlength=blocks)[allowed].double(), heads, 1 / len(allowed))


def test_the_draws_of_one_head_cover_the_whole_sequence_evenly():
    blocks, count, bins = 10_000, 3, 20
    found = draws(blocks, count, keys=head_keys(1, 0))[0]
    counts = torch.bincount(found.flatten() * bins // blocks, minlength=bins).double()
    assert_uniform(counts, blocks * count, 1 / bins)
    distance = (found - torch.arange(blocks)[:, None]) % blocks
    assert_uniform(torch.bincount(distance.flatten() * bins // blocks, minlength=bins).double(), blocks * count, 1 / bins)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("number", [4, 10, 31])
def test_the_reservoir_is_uniform(count, number):
    heads = 4000
    found = reservoir_samples(head_keys(heads, 2), count, 40)[:, number]
    assert (found.sort(-1).values.diff(dim=-1) > 0).all()
    assert_uniform(torch.bincount(found.flatten(), minlength=number).double(), heads, count / number)


def test_a_few_samples_are_those_of_all(monkeypatch):
    monkeypatch.setattr(random_draw, "_AT_ONCE", 7)
    keys, numbers = head_keys(3, 0), torch.tensor([0, 1, 3, 20, 21, 100])
    running = running_samples(tuple(keys.tolist()), 4)
    assert torch.equal(running.at(numbers), reservoir_samples(keys, 4, 120)[:, numbers])
    assert running.at(numbers[:0]).shape == (3, 0, 4)


def test_what_the_reservoir_lets_go_never_returns():
    count, total = 3, 300
    samples = reservoir_samples(head_keys(20, 0), count, total).tolist()
    for head in samples:
        gone, before = set(), set()
        for number, sample in enumerate(head):
            now = {m for m in sample if m >= 0}
            assert len(now) == min(count, number)
            assert now - before <= {number - 1}  # at most the newest joins
            gone |= before - now
            assert not now & gone
            before = now
        assert len(gone) > count


def test_the_reservoir_does_not_depend_on_the_length():
    keys = head_keys(4, 0)
    for count in (1, 2, 5):
        long = reservoir_samples(keys, count, 100)
        assert torch.equal(long, reservoir_samples(keys, count, 100))
        for total in (0, 1, 2, 7, 50):
            short = reservoir_samples(keys, count, total)
            assert short.shape == (4, total + 1, count)
            assert torch.equal(short, long[:, : total + 1])
        for head in range(4):  # and on no other head
            assert torch.equal(reservoir_samples(keys[head : head + 1], count, 100)[0], long[head])


@torch.no_grad()
def test_causal_queries_see_the_same_whatever_follows():
    mechanism = sq.BigBird(block=3, window=1, random=2, globals=1)
    long = weights_of(mechanism, 60, is_causal=True)
    for length in (1, 3, 4, 29, 30, 31):
        assert_close(weights_of(mechanism, length, is_causal=True), long[:, :length, :length])
    seen = (long > 0)[:, ::3, ::3]  # by block
    lost = seen[:, :-1] & ~seen[:, 1:]
    assert not (lost.cummax(1).values & seen[:, 1:]).any()
    assert (lost.flatten(1).sum(1) > 10).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 4, 5, 6, 10, 14, 15])
@torch.no_grad()
def test_short_sequences_are_attended_to_exactly(length, is_causal):
    """Up to three blocks: the window and a global block are all there is."""
    x = inputs(length)
    exact = sq.attention(x.query, x.key, x.value, is_causal=is_causal)
    for options in ({}, {"window": 1}, {"random": 0}, {"globals": 5, "window": 1, "random": 0}):
        mechanism = sq.BigBird(block=5, **options)
        assert_close(sq.attention(x.query, x.key, x.value, mechanism, is_causal=is_causal), exact)


@torch.no_grad()
def test_enough_random_blocks_are_all_blocks():
    x = inputs(47)
    for is_causal in (False, True):
        found = sq.attention(x.query, x.key, x.value, sq.BigBird(block=4, window=1, random=20, globals=0), is_causal=is_causal)
        assert_close(found, sq.attention(x.query, x.key, x.value, is_causal=is_causal))


def test_mix_is_a_bijection_of_32_bits():
    x = torch.cat([torch.arange(2**17), 2**32 - 1 - torch.arange(2**17), torch.arange(2**17) << 15]).unique()
    mixed = _mix(x)
    assert mixed.min() >= 0
    assert mixed.max() < 2**32
    assert len(mixed.unique()) == len(x)
    assert torch.equal(_mix(x + 2**32), mixed)
    assert int(_mix(torch.tensor(2**32 - 1))) == _mix_of_int(2**32 - 1)
    ones = torch.stack([(mixed >> bit) & 1 for bit in range(32)]).double().mean(1)
    assert ((ones - 0.5).abs() < 0.01).all()
    sample = x[::97]
    assert _mix(sample).tolist() == [_mix_of_int(v) for v in sample.tolist()]


def _mix_of_int(x):
    x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
    x = (x ^ x >> 15) * 0x735A2D97 % 2**32
    return x ^ x >> 15


def etc(**options):
    torch.manual_seed(options.pop("init", 0))
    mechanism = sq.BigBird(**{"block": 4, "window": 1, "random": 1, "globals": 1, "mode": "etc", **options})
    return mechanism.build(heads=HEADS, head_dim=DIM, value_dim=VALUE_DIM).double()


@pytest.mark.parametrize("is_causal", [False, True])
def test_extra_tokens_are_seen_by_all_and_learn(is_causal):
    x, module = inputs(41), etc()
    out = module(x.query, x.key, x.value, is_causal=is_causal)
    for row in range(0, 41, 8):
        for token in (0, 3):
            grads = torch.autograd.grad(out[:, :, row].square().sum(), module.parameters(), retain_graph=True)
            assert all((g[:, token].abs().amax(-1) > 0).all() for g in grads)
    real = torch.arange(41) < torch.tensor([[41], [10]])
    out = module(x.query, x.key, x.value, is_causal=is_causal, key_padding_mask=real)
    assert (out[1, :, 10:] == 0).all()
    with torch.no_grad():
        module.global_value.add_(1)
        more = module(x.query, x.key, x.value, is_causal=is_causal, key_padding_mask=real) - out
    assert (more[0] > 1e-6).all()
    assert (more[1, :, :10] > 1e-6).all()
    assert (more[1, :, 10:] == 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_extra_tokens(is_causal):
    case, x = Case(sq.BigBird(block=4, window=1, random=1, globals=1, mode="etc")), inputs(30, kv_heads=1)
    module = case.module_for(x)
    options = {"is_causal": is_causal, "key_padding_mask": torch.arange(30) % 5 != torch.tensor([[2], [9]])}
    parameters = list(module.parameters())
    found = torch.autograd.grad(case.run(x, **options).square().sum(), parameters)
    expected = torch.autograd.grad(case.reference(x, **options).square().sum(), parameters)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)


@torch.no_grad()
def test_extra_tokens_are_saved(tmp_path):
    x = inputs(20)
    one, other = etc(seed=5), etc(init=1)
    assert {name: tuple(p.shape) for name, p in one.named_parameters()} == {
        "global_key": (HEADS, 4, DIM),
        "global_value": (HEADS, 4, VALUE_DIM),
    }
    torch.save(one.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert other.method.seed == 5
    assert torch.equal(other(x.query, x.key, x.value), one(x.query, x.key, x.value))


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_etc_without_globals_has_nothing_extra(is_causal):
    x = inputs(20)
    found = etc(globals=0)(x.query, x.key, x.value, is_causal=is_causal)
    expected = sq.attention(x.query, x.key, x.value, sq.BigBird(block=4, window=1, random=1, globals=0), is_causal=is_causal)
    assert_close(found, expected)


@pytest.mark.parametrize("mode", ["itc", "etc"])
@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_rows_of_different_length_are_as_each_alone(mode, is_causal):
    """The last block, which is global, and what there is to draw from differ between rows."""
    lengths = (43, 1, 4, 5, 13, 29, 40)
    x = inputs(43, batch=len(lengths))
    module = etc(mode=mode, globals=2, random=2)
    right = torch.arange(43) < torch.tensor(lengths)[:, None]
    for real in (right, right.flip(1), torch.stack([row[torch.randperm(43)] for row in right])):
        found = module(x.query, x.key, x.value, key_padding_mask=real, is_causal=is_causal)
        for b, tokens in enumerate(real):
            alone = module(*(t[b : b + 1, :, tokens] for t in (x.query, x.key, x.value)), is_causal=is_causal)
            assert_close(found[b : b + 1, :, tokens], alone)
            assert (found[b, :, ~tokens] == 0).all()


def test_options():
    for window in (0, 2, 4):
        with pytest.raises(sq.OptionError, match=r"BigBird.window must be"):
            sq.BigBird(window=window)
    with pytest.raises(sq.OptionError, match=r"BigBird.mode must be one of 'itc', 'etc'"):
        sq.BigBird(mode="btc")
    x = inputs(5)
    with pytest.raises(sq.UnsupportedError, match="has learned global tokens"):
        sq.attention(x.query, x.key, x.value, sq.BigBird(mode="etc"))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_wider_than_any_sequence_shows_all_keys(is_causal):
    x = inputs(30)
    found, expected = (
        sq.attention(x.query, x.key, x.value, method, is_causal=is_causal)
        for method in (sq.BigBird(block=4, window=2**31 - 1), "softmax")
    )
    assert_close(found, expected)
