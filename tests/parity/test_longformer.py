"""Longformer beside the published layer, on the same weights: equal, for windows, global tokens and pads.

Only rows of real tokens are compared: the published layer gives 0 for those of pads.
"""

import copy

import pytest
import torch

import subquad as sq

pytest.importorskip("transformers", reason="pip install transformers, to compare with its Longformer")
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

WIDTH, HEADS = 24, 3
FEW = ([], [2, 5, 30], [0])  # global tokens of each row
MANY = ([0, 1, 2, 3, 13, 31], [7], [0, 9, 10, 11, 16])
CASES = {
    "window": (16, 64, None, None),
    "narrow": (4, 12, None, None),  # it cannot do 2
    "one chunk": (16, 16, None, None),
    "few globals": (8, 32, FEW, None),
    "many globals": (8, 48, MANY, None),
    "pads on the right": (8, 48, None, [(0, 48), (0, 33), (0, 5)]),
    "pads on the left": (8, 48, None, [(0, 48), (15, 48), (43, 48)]),
    "pads and few globals": (8, 48, FEW, [(0, 48), (0, 33), (0, 5)]),
    "pads and many globals": (16, 64, MANY, [(0, 41), (0, 64), (0, 17)]),
    "pads on the left and globals": (8, 48, ([3], [40, 47], []), [(0, 48), (15, 48), (43, 48)]),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def published(attention_window):
    config = LongformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, attention_window=[attention_window]
    )
    return LongformerSelfAttention(config, layer_id=0).eval()


def ours_like(layer):
    """`sq.Attention` with the weights of the published layer, up to its output projection, which is another module there."""
    mechanism = sq.Longformer(window=layer.one_sided_attn_window_size, num_global=0, global_projections=True)
    ours = sq.Attention(WIDTH, HEADS, mechanism).eval()
    for mine, theirs in ((ours.q_proj, layer.query), (ours.k_proj, layer.key), (ours.v_proj, layer.value)):
        mine.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for name in ("query", "key", "value"):
            for part in ("weight", "bias"):
                mine = getattr(ours.mechanism, f"global_{name}_{part}")
                mine.copy_(getattr(getattr(layer, f"{name}_global"), part))
    ours.out_proj = torch.nn.Identity()
    return ours


def double(module):
    return copy.deepcopy(module).double()


def build(case):
    """The published layer, tokens, and the masks of global and of real tokens."""
    attention_window, length, rows, spans = case
    is_global, real = torch.zeros(3, length, dtype=torch.bool), torch.ones(3, length, dtype=torch.bool)
    for row, positions in enumerate(rows or ()):
        is_global[row, positions] = True
    for row, (start, end) in enumerate(spans or ()):
        real[row, :start], real[row, end:] = False, False
    return published(attention_window), 3 * torch.randn(3, length, WIDTH), is_global & real, real


def theirs(layer, x, is_global, real):
    mask = 10000.0 * (is_global.to(x.dtype) - (~real).to(x.dtype))
    return layer(x, mask, ~real, is_global, bool(is_global.any()))[0]


def mine(layer, x, is_global, real):
    return layer(
        x,
        global_mask=is_global if is_global.any() else None,
        key_padding_mask=None if real.all() else real,
    )


@pytest.fixture
def softmax_of_its_input(monkeypatch):
    """The published layer takes its softmax in float32, also of float64: here in the precision that it gets."""
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: x.softmax(dim))


@every_case
@pytest.mark.usefixtures("softmax_of_its_input")
@torch.no_grad()
def test_equal_in_float64(case):
    layer, x, is_global, real = build(case)
    expected = theirs(double(layer), x.double(), is_global, real)
    found = mine(double(ours_like(layer)), x.double(), is_global, real)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-10, atol=1e-10)


@every_case
@torch.no_grad()
def test_as_accurate_in_float32(case, request):
    layer, x, is_global, real = build(case)
    ours = ours_like(layer)
    outs = [mine(ours, x, is_global, real), theirs(layer, x, is_global, real)]
    request.getfixturevalue("softmax_of_its_input")
    truth = theirs(double(layer), x.double(), is_global, real)
    found, expected = ((out.double() - truth)[real].norm() for out in outs)
    assert found <= 2 * expected


@pytest.mark.usefixtures("softmax_of_its_input")
def test_equal_gradients():
    layer, x, is_global, real = build(CASES["pads and many globals"])
    layer, ours = double(layer), double(ours_like(layer))
    first, second = (x.double().requires_grad_() for _ in range(2))
    mine(ours, first, is_global, real)[real].square().sum().backward()
    theirs(layer, second, is_global, real)[real].square().sum().backward()
    pairs = [(first, second)]
    for name, projection in (("query", ours.q_proj), ("key", ours.k_proj), ("value", ours.v_proj)):
        of_all, of_global = getattr(layer, name), getattr(layer, f"{name}_global")
        for part in ("weight", "bias"):
            pairs.append((getattr(projection, part), getattr(of_all, part)))
            pairs.append((getattr(ours.mechanism, f"global_{name}_{part}"), getattr(of_global, part)))
    for found, expected in pairs:
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-10)
