"""BigBird beside the published layer, on the same weights and the same random blocks: equal where a key is attended once.

The published layer draws in training only, and not over the whole sequence; in evaluation its random blocks are all block 0. It
attends twice to a block that it sees for two reasons. Its last global block is the last one of the padded length: both mean the
same where all pads lie in the last block.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import subquad as sq
from subquad.ops.sparse import random_blocks

pytest.importorskip("transformers", reason="pip install transformers, to compare with its BigBird")
from transformers import BigBirdConfig, BigBirdModel
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

WIDTH, HEADS = 24, 3
CASES = {  # block, blocks, random blocks, and how many real tokens each row has
    "one random block": (4, 12, 1, None),
    "three random blocks": (4, 13, 3, None),
    "wider blocks": (8, 17, 2, None),
    "pads in the last block": (8, 14, 2, [112, 107, 105]),
    "pads in the last block, three random blocks": (4, 20, 3, [77, 80, 78]),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def config_of(block, random, positions=4096, heads=HEADS, **options):
    return BigBirdConfig(
        hidden_size=8 * heads,
        num_attention_heads=heads,
        block_size=block,
        num_random_blocks=random,
        max_position_embeddings=positions,
        **options,
    )


def published(block, random, seed=3, **options):
    """The layer in training, where it draws; it has no dropout. `layer.drew` are the blocks (B, H, blocks - 2, r) of a call."""
    layer = BigBirdBlockSparseAttention(config_of(block, random, **options), seed=seed).train()
    gather = layer.torch_gather_b2

    def recorded(blocks, index):
        layer.drew = index
        return gather(blocks, index)

    layer.torch_gather_b2 = recorded
    return layer


def theirs(layer, x, real):
    blocked, band, queries, keys = BigBirdModel.create_masks_for_block_sparse_attn(real.to(x.dtype), layer.block_size)
    return layer(x, band, queries, keys, blocked, blocked)[0]


def ours_like(layer):
    """`sq.Attention` with the weights of the published layer, up to its output projection, which is another module there."""
    ours = sq.Attention(WIDTH, HEADS, sq.BigBird(block=layer.block_size, random=layer.num_random_blocks))
    for mine, theirs in ((ours.q_proj, layer.query), (ours.k_proj, layer.key), (ours.v_proj, layer.value)):
        mine.load_state_dict(theirs.state_dict())
    ours.out_proj = torch.nn.Identity()
    return ours


def mine(ours, x, real):
    return ours(x, key_padding_mask=None if real.all() else real)


@pytest.fixture
def drawn_anew():
    """What was drawn for a length is kept for later calls; not in and after tests that replace it."""
    random_blocks._draw_once.cache_clear()
    yield
    random_blocks._draw_once.cache_clear()


@pytest.fixture
def take(monkeypatch, drawn_anew):
    """Makes our layers draw what the published one drew last; it draws nothing for the global rows."""

    def take(layer):
        index = F.pad(layer.drew[:1], (0, 0, 1, 1), value=-1)
        random_blocks._draw_once.cache_clear()
        monkeypatch.setattr(random_blocks, "draw_blocks", lambda *_, **__: index)

    return take


def real_tokens(length, lengths):
    return torch.arange(length) < torch.tensor(lengths)[:, None]


def build(case):
    block, blocks, random, lengths = case
    length = block * blocks
    return published(block, random), 3 * torch.randn(3, length, WIDTH), real_tokens(length, lengths or [length] * 3)


def seen_already(index, blocks):
    """Which of the blocks that blocks 1, 2, ... of queries drew, (..., queries, r), are in the window, or global."""
    query = torch.arange(1, index.shape[-2] + 1)[:, None]
    return ((index - query).abs() <= 1) | (index == 0) | (index == blocks - 1)


@every_case
@torch.no_grad()
def test_equal_in_float64(case, take):
    layer, x, real = build(case)
    layer, ours, x = layer.double(), ours_like(layer).double(), x.double()
    expected = theirs(layer, x, real)
    assert not seen_already(layer.drew, case[1]).any()
    take(layer)
    torch.testing.assert_close(mine(ours, x, real)[real], expected[real], rtol=1e-10, atol=1e-10)


@every_case
@torch.no_grad()
def test_as_accurate_in_float32(case, take):
    layer, x, real = build(case)
    ours, out = ours_like(layer), theirs(layer, x, real)
    take(layer)
    outs = [mine(ours, x, real), out]
    truth = theirs(layer.double(), x.double(), real)
    found, expected = ((out.double() - truth)[real].norm() for out in outs)
    assert found <= 2 * expected


def test_equal_gradients(take):
    layer, x, real = build(CASES["pads in the last block"])
    layer, ours = layer.double(), ours_like(layer).double()
    first, second = (x.double().requires_grad_() for _ in range(2))
    theirs(layer, second, real)[real].square().sum().backward()
    take(layer)
    mine(ours, first, real)[real].square().sum().backward()
    pairs = [(first, second)]
    for a, b in ((ours.q_proj, layer.query), (ours.k_proj, layer.key), (ours.v_proj, layer.value)):
        pairs += [(a.weight, b.weight), (a.bias, b.bias)]
    for found, expected in pairs:
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_the_published_last_block_is_lost_to_padding(take):
    """Where a whole block of pads follows, the last real tokens are no longer global: the same tokens give another output.

    Its random blocks are those of the short sequence, since they come from the first 2r + 5 blocks. Ours, given the same
    ones, gives the same output.
    """
    layer, x = published(4, 1).double(), 3 * torch.randn(2, 60, WIDTH, dtype=torch.float64)
    ours, alone = ours_like(layer).double(), theirs(layer, x[:, :48], real_tokens(48, [48, 48]))
    draw, real = layer.drew, real_tokens(60, [48, 48])
    take(layer)
    torch.testing.assert_close(ours(x[:, :48]), alone)

    padded = theirs(layer, x, real)[:, :48]
    assert torch.equal(layer.drew[:, :, :10], draw)
    assert (padded - alone).norm() > 0.01 * alone.norm()
    layer.drew = F.pad(draw, (0, 0, 0, 3))  # rows of pads
    take(layer)
    torch.testing.assert_close(ours(x, key_padding_mask=real)[:, :48], alone)


@torch.no_grad()
def test_the_published_random_blocks_are_the_first_in_evaluation():
    """It draws in training only. In evaluation its r random blocks are all block 0, which is global and so is seen already.

    There are then no random blocks, and each key of block 0 is attended 1 + r times, by all rows but the global ones. Ours
    attends once, to the same blocks in training and in evaluation.
    """
    block, blocks, random = 4, 12, 2
    layer, x = published(block, random).double(), 3 * torch.randn(2, block * blocks, WIDTH, dtype=torch.float64)
    evaluated = theirs(layer.eval(), x, torch.ones(x.shape[:2], dtype=torch.bool))
    assert (layer.drew == 0).all()

    number = torch.arange(block * blocks) // block
    query, key = number[:, None], number
    ends = torch.tensor([0, blocks - 1])
    seen = ((query - key).abs() <= 1) | torch.isin(query, ends) | torch.isin(key, ends)
    times = torch.where((key == 0) & ~torch.isin(query, ends), 1.0 + random, 1.0).double()
    q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (layer.query, layer.key, layer.value))

    def dense(added):
        mask = added.masked_fill(~seen, -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    torch.testing.assert_close(evaluated, dense(times.log()))
    once = sq.attention(q, k, v, sq.BigBird(block=block, random=0)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(once, dense(torch.zeros_like(times)))
    assert (evaluated - once).norm() > 0.01 * once.norm()

    ours = ours_like(layer).double()
    assert torch.equal(ours.eval()(x), ours.train()(x))


class DrawnError(Exception):
    """Ends a call once its blocks are drawn: what the published layer computes from there on has the square of its length."""


def published_draw(length, heads=12):
    """The blocks (heads, blocks - 2, 3) that a layer of the published sizes draws in training: 4,096 positions, blocks of 64."""

    def stop(_, index):
        raise DrawnError(index)

    layer = published(64, 3, heads=heads)
    layer.torch_gather_b2 = stop
    with pytest.raises(DrawnError) as drawn, torch.no_grad():
        theirs(layer, torch.zeros(1, length, 8 * heads), torch.ones(1, length, dtype=torch.bool))
    return drawn.value.args[0][0]


@pytest.fixture
def our_draw(monkeypatch, drawn_anew):
    """The same of ours, but for the global rows."""
    drawn, found = random_blocks.draw_blocks, []

    def recorded(*inputs, **options):
        found.append(drawn(*inputs, **options))
        return found[-1]

    def our_draw(length, heads=12):
        sq.attention(*torch.randn(3, 1, heads, length, 1), sq.BigBird(block=64, random=3))
        return found[-1][0, :, 1:-1]

    monkeypatch.setattr(random_blocks, "draw_blocks", recorded)
    return our_draw


@pytest.mark.parametrize(("length", "reach"), [(3072, 16), (4096, 16), (2048, 10), (3584, 10)])
def test_the_published_random_blocks_reach_only_the_first_tokens(length, reach, our_draw):
    """They are drawn among the first 1,024 tokens in sequences of 1,024, 3,072 and 4,096 tokens, with blocks of 64.

    For other lengths it is less: the first 2r + 5 blocks but the last of them, 640 tokens where r = 3. Block 0 is global, so that
    it is not drawn. Ours are drawn over the whole sequence.
    """
    theirs, ours = published_draw(length), our_draw(length)
    assert theirs.shape == ours.shape
    assert theirs.unique().tolist() == list(range(1, reach))
    assert ours.unique().tolist() == list(range(1, length // 64 - 1))
    assert not seen_already(ours, length // 64).any()


def test_three_of_four_random_blocks_lie_beyond_them_in_ours(our_draw):
    """At 4,096 tokens, over all heads and query blocks; in the published layer none does."""
    theirs, ours = ((draw * 64 >= 1024).double().mean() for draw in (published_draw(4096), our_draw(4096)))
    assert theirs == 0
    assert 0.72 < ours < 0.79  # 47 of the 62 blocks that are not global


def test_the_published_random_blocks_may_be_global_at_1024(our_draw):
    """Its last block, number 15, is drawn like any other of the first 1,024 tokens: some rows attend to it twice."""
    theirs, ours = published_draw(1024), our_draw(1024)
    twice = seen_already(theirs, 16)
    assert twice.any()
    assert (theirs[twice] == 15).all()
    assert not seen_already(ours, 16).any()


@torch.no_grad()
def test_the_published_switch_of_mode_outlives_the_call():
    """A short sequence makes its model dense for good, so that a long one is no longer what it was. Ours keeps no such thing."""
    sizes = {"vocab_size": 80, "num_hidden_layers": 1, "intermediate_size": 8, "attention_type": "block_sparse"}
    model = BigBirdModel(config_of(4, 1, **sizes)).eval()
    tokens = torch.randint(80, (1, 48))
    before = model(tokens)[0]
    model(tokens[:, :8])
    assert (model(tokens)[0] - before).norm() > 1e-4 * before.norm()

    ours, x = sq.Attention(WIDTH, HEADS, sq.BigBird(block=4, random=1)), torch.randn(1, 48, WIDTH)
    before = ours(x)
    ours(x[:, :8])
    assert torch.equal(ours(x), before)
