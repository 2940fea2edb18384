"""Nystrom attention beside the published layer, on the same weights: equal where that one is well-defined.

The published layer has no single meaning beyond that: its default start of the pseudo-inverse is taken over all sequences of the
batch, and pads count as tokens in its landmarks.
"""

import copy
from contextlib import contextmanager

import pytest
import torch

import subquad as sq

pytest.importorskip("transformers", reason="pip install transformers, to compare with its Nystromformer")
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

WIDTH, HEADS, LANDMARKS = 24, 3, 16


def published(length, conv=None, init="exact"):
    """The layer, its pseudo-inverse started for each matrix alone. Its config's switch for that raises, and none leaves conv out."""
    config = NystromformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_landmarks=LANDMARKS,
        segment_means_seq_len=length,
        conv_kernel_size=conv or 1,
        attention_probs_dropout_prob=0.0,
    )
    layer = NystromformerSelfAttention(config).eval()
    layer.init_option, layer.conv_kernel_size = init, conv
    return layer


def ours_like(layer):
    """`sq.Attention` with the weights of the published layer, up to its output projection, which is another module there."""
    ours = sq.Attention(WIDTH, HEADS, sq.Nystrom(landmarks=LANDMARKS, conv=layer.conv_kernel_size)).eval()
    with torch.no_grad():
        for mine, theirs in ((ours.q_proj, layer.query), (ours.k_proj, layer.key), (ours.v_proj, layer.value)):
            mine.load_state_dict(theirs.state_dict())
        if layer.conv_kernel_size is not None:
            ours.mechanism.kernel.copy_(layer.conv.weight[:, 0, :, 0])
    ours.out_proj = torch.nn.Identity()
    return ours


def double(module):
    return copy.deepcopy(module).double()


@contextmanager
def float64():
    """The published layer makes an identity matrix of the default precision."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def in_float64(layer, x):
    with float64():
        return double(layer)(x.double())[0]


@pytest.mark.parametrize("conv", [None, 5])
@pytest.mark.parametrize("length", [32, 64, 160])
@torch.no_grad()
def test_equal_in_float64(length, conv):
    layer, x = published(length, conv), torch.randn(2, length, WIDTH)
    torch.testing.assert_close(double(ours_like(layer))(x.double()), in_float64(layer, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("conv", [None, 5])
@torch.no_grad()
def test_as_accurate_in_float32(conv):
    layer, x = published(160, conv), torch.randn(2, 160, WIDTH)
    truth = in_float64(layer, x)
    ours, theirs = ((out.double() - truth).norm() for out in (ours_like(layer)(x), layer(x)[0]))
    assert ours <= 2 * theirs


def test_equal_gradients():
    layer, x = published(64, conv=5), torch.randn(2, 64, WIDTH)
    ours = double(ours_like(layer))
    layer, x = double(layer), x.double()
    with float64():
        layer(x)[0].square().sum().backward()
    ours(x).square().sum().backward()
    pairs = [(ours.q_proj.weight, layer.query.weight), (ours.k_proj.weight, layer.key.weight)]
    pairs += [(ours.v_proj.weight, layer.value.weight), (ours.mechanism.kernel, layer.conv.weight)]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.grad.flatten(), theirs.grad.flatten(), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_few_tokens_are_exact_in_both():
    layer, x = published(LANDMARKS), torch.randn(2, LANDMARKS, WIDTH)
    torch.testing.assert_close(ours_like(layer)(x), layer(x)[0])


@torch.no_grad()
def test_the_published_start_depends_on_batch_mates():
    """Its default divides every matrix by the largest norm of the whole batch; six steps do not make up for that."""
    layer, x = published(64, init="original"), torch.randn(3, 64, WIDTH) * torch.tensor([1.0, 1.0, 40.0])[:, None, None]
    ours = ours_like(layer)
    assert (layer(x)[0][:1] - layer(x[:1])[0]).norm() > 1e-3 * layer(x[:1])[0].norm()
    torch.testing.assert_close(ours(x)[:1], ours(x[:1]))


@float64()
@torch.no_grad()
def test_the_published_landmarks_average_pads():
    """A mask reaches only one of its three factors: pads stay in its landmarks, and so in the output of real tokens.

    Padding 64 tokens to 128 changes what it says of them, and so does the content of the pads. Ours does neither.
    """
    x, pads = torch.randn(2, 2, 64, WIDTH).unbind(0)
    real = torch.cat([torch.ones(2, 64), torch.zeros(2, 64)], dim=1).bool()
    added = torch.zeros(2, 1, 1, 128).masked_fill(~real[:, None, None, :], torch.finfo(x.dtype).min)
    short, long = published(64), published(128)
    long.load_state_dict(short.state_dict())
    ours, alone = ours_like(short), short(x)[0]
    torch.testing.assert_close(ours(x), alone)

    sequences = [torch.cat([x, content], dim=1) for content in (pads, 3 * pads)]
    first, second = (long(sequence, added)[0][:, :64] for sequence in sequences)
    assert all((a - b).norm() > 0.01 * alone.norm() for a, b in ((first, alone), (second, alone), (first, second)))
    first, second = (ours(sequence, key_padding_mask=real)[:, :64] for sequence in sequences)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, ours(x))
