import pytest
import torch

import subquad as sq


def qkv(length, heads=4, kv_heads=4):
    return (torch.randn(2, h, length, 8, dtype=torch.float64) for h in (heads, kv_heads, kv_heads))


@pytest.mark.parametrize(
    ("share", "shapes"),
    [
        ("none", {"key_projection": (2, 3, 20), "value_projection": (2, 3, 20)}),
        ("head", {"key_projection": (3, 20), "value_projection": (3, 20)}),
        ("kv", {"projection": (3, 20)}),
        ("layer", {"projection": (3, 20)}),
    ],
)
def test_what_is_shared(share, shapes):
    module = sq.Linformer(rank=3, max_length=20, share=share).build(heads=4, kv_heads=2, head_dim=8)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == shapes


@torch.no_grad()
def test_every_way_of_sharing_is_a_case_of_none():
    q, k, v = qkv(20, kv_heads=2)
    none = sq.Linformer(rank=3, max_length=20, share="none").build(heads=4, kv_heads=2, head_dim=8).double()
    for share in ("head", "kv", "layer"):
        module = sq.Linformer(rank=3, max_length=20, share=share).build(heads=4, kv_heads=2, head_dim=8).double()
        for name, target in none.named_parameters():
            target.copy_(dict(module.named_parameters()).get(name, getattr(module, "projection", None)))
        torch.testing.assert_close(module(q, k, v), none(q, k, v))


def model(layers=3):
    """A model whose layers share one matrix."""
    mechanism = sq.Linformer(rank=3, max_length=20, share="layer")
    stack = torch.nn.ModuleList(sq.Attention(16, 4, mechanism) for _ in range(layers))
    for layer in stack[1:]:
        layer.mechanism.projection = stack[0].mechanism.projection
    return stack


def run(stack, x):
    for layer in stack:
        x = x + layer(x)
    return x


def test_layers_are_tied():
    """One parameter, trained by all layers, and still one after it was saved and loaded."""
    stack, x = model(), torch.randn(2, 13, 16)
    matrices = [p for p in stack.parameters() if p.shape == (3, 20)]
    assert len(matrices) == 1
    run(stack, x).square().sum().backward()
    with torch.no_grad():
        matrices[0] -= 0.1 * matrices[0].grad
    other = model()
    other.load_state_dict(stack.state_dict())
    assert torch.equal(run(other, x), run(stack, x))
    assert len({id(layer.mechanism.projection) for layer in other}) == 1


def test_more_keys_than_columns_are_refused():
    module = sq.Linformer(rank=3, max_length=20).build(heads=4, head_dim=8).double()
    with pytest.raises(sq.InputError, match=r"at most max_length=20; got 21\. Build it with a larger max_length"):
        module(*qkv(21))
    q, k, v = qkv(20)
    assert module(torch.cat([q, q], dim=2), k, v).shape == (2, 4, 40, 8)


@torch.no_grad()
def test_a_token_uses_one_column_wherever_pads_stand():
    module = sq.Linformer(rank=3, max_length=20).build(heads=4, head_dim=8).double()
    q, k, v = qkv(20)
    real = torch.arange(20) % 3 > 0
    expected = module(q, k[:, :, real], v[:, :, real])
    torch.testing.assert_close(module(q, k, v, key_padding_mask=real.expand(2, 20)), expected)
    for parameter in module.parameters():
        parameter[:, int(real.sum()) :] = 1e3
    torch.testing.assert_close(module(q, k, v, key_padding_mask=real.expand(2, 20)), expected)


def test_bad_options():
    with pytest.raises(sq.OptionError, match=r"Linformer\.share must be one of 'none', 'head', 'kv', 'layer'; got 'heads'"):
        sq.Linformer(share="heads")
    with pytest.raises(sq.OptionError, match=r"Linformer\.rank must be an integer of at least 1; got 0"):
        sq.Linformer(rank=0)
