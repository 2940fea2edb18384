"""`subquad.Attention`: projections around every mechanism."""

import copy

import pytest
import torch

import subquad as sq
from subquad.rotary import positions, rotate
from tests.harness import every_case

WIDTH, HEADS = 24, 4


def build(case, **options):
    torch.manual_seed(0)
    return sq.Attention(WIDTH, HEADS, case.mechanism, **options).double().train(not case.info.updates)


def tokens(length, batch=2, width=WIDTH):
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, width, generator=generator, dtype=torch.float64)


def torch_twin(ours, **options):
    """PyTorch's own layer with the same weights."""
    twin = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, **options)
    projections = [getattr(ours, name) for name in ("q_proj", "k_proj", "v_proj")]
    with torch.no_grad():
        if "kdim" in options:
            for name, p in zip(("q", "k", "v"), projections, strict=True):
                getattr(twin, f"{name}_proj_weight").copy_(p.weight)
        else:
            twin.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        twin.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        twin.out_proj.weight.copy_(ours.out_proj.weight)
        twin.out_proj.bias.copy_(ours.out_proj.bias)
    return twin


@torch.no_grad()
def test_softmax_equals_torch():
    ours = sq.Attention(WIDTH, HEADS).double()
    x, real = tokens(9), torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
    expected = torch_twin(ours)(x, x, x, key_padding_mask=~real, need_weights=False)[0]
    torch.testing.assert_close(ours(x, key_padding_mask=real)[real], expected[real])


@torch.no_grad()
def test_softmax_cross_equals_torch():
    ours = sq.Attention(WIDTH, HEADS, source_dim=10).double()
    x, source = tokens(9), tokens(13, width=10)
    expected = torch_twin(ours, kdim=10, vdim=10)(x, source, source, need_weights=False)[0]
    torch.testing.assert_close(ours(x, source), expected)


@every_case()
def test_holds_every_mechanism(case):
    module = build(case, kv_heads=None if case.why_not(enable_gqa=True) else 2)
    for is_causal in case.directions:
        out = module(tokens(70), is_causal=is_causal)
        assert out.shape == (2, 70, WIDTH)
        module.zero_grad()
        out.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    if not case.why_not(cross=True):
        assert build(case, source_dim=10)(tokens(5), tokens(7, width=10)).shape == (2, 5, WIDTH)


@every_case()
@torch.no_grad()
def test_saves_and_loads(case):
    source, target = build(case), build(case)
    for parameter in source.parameters():
        parameter.add_(0.1)
    target.load_state_dict(source.state_dict())
    is_causal = case.directions[-1]
    assert torch.equal(source(tokens(9), is_causal=is_causal), target(tokens(9), is_causal=is_causal))
    assert torch.equal(copy.deepcopy(source)(tokens(9), is_causal=is_causal), target(tokens(9), is_causal=is_causal))


@every_case(decode=True)
@pytest.mark.parametrize("rotary", [None, 10_000.0])
@torch.no_grad()
def test_state(case, rotary):
    module, x = build(case, rotary=rotary), tokens(90)
    state, outs = None, []
    for piece in x.split([40, 1, 1, 48], dim=1):
        out, state = module(piece, is_causal=True, state=state, return_state=True)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=1), module(x, is_causal=True))
    again = sq.State.from_state_dict(state.state_dict()).reorder(torch.tensor([1, 0]))
    out, _ = module(x[[1, 0], :1], is_causal=True, state=again, return_state=True)
    torch.testing.assert_close(out[[1, 0]], module(torch.cat([x, x[:, :1]], dim=1), is_causal=True)[:, -1:])


@every_case(decode=True, key_padding_mask=True)
@torch.no_grad()
def test_rotary_positions_count_from_the_first_real_token(case):
    module, x = build(case, rotary=10_000.0), tokens(40)
    padded = torch.cat([torch.full((2, 13, WIDTH), 7.0, dtype=torch.float64), x], dim=1)
    real = torch.ones(2, 53, dtype=torch.bool)
    real[:, :13] = False
    expected = module(x, is_causal=True)
    torch.testing.assert_close(module(padded, is_causal=True, key_padding_mask=real)[:, 13:], expected)
    state, outs = None, []
    for piece, mask in zip(padded.split([5, 20, 28], dim=1), real.split([5, 20, 28], dim=1), strict=True):
        out, state = module(piece, is_causal=True, key_padding_mask=mask, state=state, return_state=True)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=1)[:, 13:], expected)


@every_case(decode=True, key_padding_mask=True)
@torch.no_grad()
def test_going_on_after_right_pads(case):
    module, x, new = build(case, rotary=10_000.0), tokens(6), tokens(1)
    _, alone = module(x[:, :4], is_causal=True, return_state=True)
    real = torch.tensor([[True] * 4 + [False] * 2] * 2)
    _, padded = module(x, is_causal=True, key_padding_mask=real, return_state=True)
    torch.testing.assert_close(module(new, is_causal=True, state=padded), module(new, is_causal=True, state=alone))


@every_case(key_padding_mask=True)
def test_pads_of_tokens_reach_neither_output_nor_gradients(case):
    real = torch.tensor([[True] * 9, [False] * 3 + [True] * 6])
    for is_causal in case.directions:
        results = []
        for fill in (0.0, float("nan")):
            module, x = build(case), tokens(9).masked_fill(~real.unsqueeze(-1), fill)
            out = module(x, is_causal=is_causal, key_padding_mask=real)
            out[real].sum().backward()
            results.append([out, *(p.grad for p in module.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@torch.no_grad()
def test_the_gate_reads_the_source():
    module = sq.Attention(WIDTH, HEADS, sq.RFA(gated=True), source_dim=10).double()
    x, source = tokens(9), tokens(9, width=10)
    q, k, v = (
        p(t).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for p, t in ((module.q_proj, x), (module.k_proj, source), (module.v_proj, source))
    )
    expected = module.mechanism(q, k, v, is_causal=True, hidden=source)
    torch.testing.assert_close(module(x, source, is_causal=True), module.out_proj(expected.transpose(1, 2).flatten(-2)))


def test_head_dim():
    module = sq.Attention(10, 4, head_dim=6, kv_heads=2)
    shapes = [tuple(p.weight.shape) for p in (module.q_proj, module.k_proj, module.out_proj)]
    assert shapes == [(24, 10), (12, 10), (10, 24)]
    assert module(torch.randn(2, 5, 10)).shape == (2, 5, 10)


def test_rotary_turns_in_float32():
    x, position = torch.randn(1, 1, 50, 8).bfloat16(), torch.arange(50)[None]
    assert torch.equal(rotate(x, position, 1e4), rotate(x.float(), position, 1e4).bfloat16())


def test_rotary_is_relative():
    q, k = torch.randn(2, 1, 3, 1, 8, dtype=torch.float64).unbind(0)
    at = lambda i: torch.tensor([[i]])
    score = lambda i, j: (rotate(q, at(i), 1e4) * rotate(k, at(j), 1e4)).sum(-1)
    torch.testing.assert_close(score(7, 3), score(1_000_007, 1_000_003))
    assert not torch.allclose(score(7, 3), score(7, 4))
    torch.testing.assert_close(rotate(q, at(0), 1e4), q)


def test_rotary_formula():
    x, position = torch.randn(1, 1, 1, 4, dtype=torch.float64), torch.tensor([[3]])
    a, b, c, d = x.flatten().tolist()
    first, second = torch.tensor([3.0, 3.0 / 100], dtype=torch.float64)
    expected = [
        a * first.cos() - c * first.sin(),
        b * second.cos() - d * second.sin(),
        c * first.cos() + a * first.sin(),
        d * second.cos() + b * second.sin(),
    ]
    torch.testing.assert_close(rotate(x, position, 1e4).flatten(), torch.stack(expected))


def test_positions():
    start = torch.tensor([0, 0, 5])
    real = torch.tensor([[False, True, False, True], [False] * 4, [False, True, True, True]])
    position, after = positions(start, 4, real)
    assert position.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [4, 5, 6, 7]]
    assert after.tolist() == [2, 0, 8]


def test_dropout_only_in_training():
    module, x = sq.Attention(WIDTH, HEADS, dropout=0.5), torch.randn(1, 9, WIDTH)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_scale_and_bias():
    module, x = sq.Attention(WIDTH, HEADS, bias=False, scale=0.01), torch.randn(1, 9, WIDTH)
    assert all(p.dim() == 2 for p in module.parameters())
    plain = sq.Attention(WIDTH, HEADS, bias=False)
    plain.load_state_dict(module.state_dict())
    assert not torch.allclose(module(x), plain(x))


def test_autocast():
    module, x = sq.Attention(WIDTH, HEADS, sq.RFA(gated=True), rotary=1e4), torch.randn(2, 30, WIDTH)
    plain = module(x, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = module(x, is_causal=True)
    assert mixed.dtype == torch.bfloat16
    assert (mixed.float() - plain).norm() < 0.05 * plain.norm()


@pytest.mark.parametrize("method", ["local", "reformer", "nystrom"])
def test_another_width_of_source_needs_cross_attention(method):
    with pytest.raises(sq.UnsupportedError, match="cross-attention"):
        sq.Attention(16, 2, method, source_dim=8)


@torch.no_grad()
def test_a_large_integer_as_scale():
    for method in (sq.Plain(), sq.Longformer(window=3), sq.BigBird(block=4), sq.Pooled(stride=3), sq.Clustered(), sq.SVD()):
        q, k, v = torch.randn(3, 1, 2, 9, 4).unbind(0)
        assert torch.equal(*(sq.attention(q, k, v, method, scale=scale) for scale in (10**20, 1e20)))
