"""Softmax models beside PyTorch's own transformers with the same weights: equal outputs at real tokens, equal gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers", reason="pip install 'subquad[hf]', for the models")
from subquad.models import SubquadConfig, SubquadForConditionalGeneration, SubquadModel
from tests.harness import assert_close

WIDTH, HEADS, INNER, LAYERS, BATCH, LENGTH, SOURCE = 10, 2, 13, 2, 3, 7, 5

every_norm_and_act = pytest.mark.parametrize(
    ("norm_position", "hidden_act"), [(norm, act) for norm in ("pre", "post") for act in ("relu", "gelu")]
)
padded_or_not = pytest.mark.parametrize("pads", [False, True], ids=["unpadded", "padded"])


def build(cls=SubquadModel, **options):
    """Ours in float64, with no weight at a special value."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    model = cls(SubquadConfig(**{"vocab_size": None, "position": "none", **sizes, **options})).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) / 3
    return model


def torch_stack(kind, norm_position, hidden_act, layers=LAYERS):
    """PyTorch's `kind`, "Encoder" or "Decoder"."""
    options = {"dropout": 0.0, "activation": hidden_act, "batch_first": True, "norm_first": norm_position == "pre"}
    layer = getattr(nn, f"Transformer{kind}Layer")(WIDTH, HEADS, INNER, **options)
    norm = nn.LayerNorm(WIDTH) if norm_position == "pre" else None
    plain = {"enable_nested_tensor": False} if kind == "Encoder" else {}
    return getattr(nn, f"Transformer{kind}")(layer, layers, norm, **plain).double()


def names(model):
    """Each of PyTorch's parameters, and ours that it holds one behind the other."""
    across = model.config.add_cross_attention
    modules = {"linear1": "feed_forward.up_proj", "linear2": "feed_forward.down_proj", "norm1": "self_attn_norm"}
    modules |= {"norm2": "cross_attn_norm", "norm3": "feed_forward_norm"} if across else {"norm2": "feed_forward_norm"}
    attentions = {"self_attn": "self_attn", **({"multihead_attn": "cross_attn"} if across else {})}
    found = {}
    for layer in range(model.config.num_hidden_layers):
        for kind in ("weight", "bias"):
            for theirs, ours in modules.items():
                found[f"layers.{layer}.{theirs}.{kind}"] = [f"layers.{layer}.{ours}.{kind}"]
            for theirs, ours in attentions.items():
                projections = [f"layers.{layer}.{ours}.{part}_proj.{kind}" for part in "qkv"]
                found[f"layers.{layer}.{theirs}.in_proj_{kind}"] = projections
                found[f"layers.{layer}.{theirs}.out_proj.{kind}"] = [f"layers.{layer}.{ours}.out_proj.{kind}"]
    if model.norm is not None:
        found |= {f"norm.{kind}": [f"norm.{kind}"] for kind in ("weight", "bias")}
    return found


def pairs(ours, theirs):
    """Parameters of PyTorch's, each with the list of ours; none left out on either side."""
    named, mine, table = dict(theirs.named_parameters()), dict(ours.named_parameters()), names(ours)
    assert table.keys() == named.keys()
    assert {name for group in table.values() for name in group} == mine.keys() - {"embed_tokens.weight"}
    return [(named[name], [mine[part] for part in group]) for name, group in table.items()]


def give_weights(ours, theirs):
    with torch.no_grad():
        for twin, parts in pairs(ours, theirs):
            twin.copy_(torch.cat(parts))
    return theirs


def assert_same_gradients(ours, theirs):
    for twin, parts in pairs(ours, theirs):
        assert_close(torch.cat([part.grad for part in parts]), twin.grad)


def tokens(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, length, WIDTH, generator=generator, dtype=torch.float64)


def real_tokens(length, pads):
    """Pads at the end, in the middle, and nowhere; PyTorch has NaN for a causal query without a key, so the first is real."""
    real = torch.ones(BATCH, length, dtype=torch.bool)
    if pads:
        real[1, length - 2 :] = False
        real[2, 1:3] = False
    return real


def pull_back(out, real):
    """Gradients of a weighted sum over the real tokens."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    (out * weights)[real].sum().backward()


def causal_mask(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def compare(ours, theirs, out, expected, real):
    assert_close(out[real], expected[real])
    pull_back(out, real)
    pull_back(expected, real)
    assert_same_gradients(ours, theirs)


@padded_or_not
@every_norm_and_act
def test_an_encoder_is_torchs(norm_position, hidden_act, pads):
    ours = build(norm_position=norm_position, hidden_act=hidden_act)
    theirs = give_weights(ours, torch_stack("Encoder", norm_position, hidden_act))
    x, real = tokens(LENGTH, 1), real_tokens(LENGTH, pads)
    if pads:
        real[0, :3] = False
    out = ours(inputs_embeds=x, attention_mask=real if pads else None).last_hidden_state
    compare(ours, theirs, out, theirs(x, src_key_padding_mask=~real if pads else None), real)


@padded_or_not
@every_norm_and_act
def test_a_decoder_is_torchs_encoder_with_a_causal_mask(norm_position, hidden_act, pads):
    ours = build(norm_position=norm_position, hidden_act=hidden_act, is_decoder=True)
    theirs = give_weights(ours, torch_stack("Encoder", norm_position, hidden_act))
    x, real = tokens(LENGTH, 1), real_tokens(LENGTH, pads)
    out = ours(inputs_embeds=x, attention_mask=real if pads else None).last_hidden_state
    expected = theirs(x, mask=causal_mask(LENGTH), src_key_padding_mask=~real if pads else None)
    compare(ours, theirs, out, expected, real)


@padded_or_not
@every_norm_and_act
def test_a_decoder_with_cross_attention_is_torchs(norm_position, hidden_act, pads):
    ours = build(norm_position=norm_position, hidden_act=hidden_act, is_decoder=True, add_cross_attention=True)
    theirs = give_weights(ours, torch_stack("Decoder", norm_position, hidden_act))
    x, real = tokens(LENGTH, 1), real_tokens(LENGTH, pads)
    source, source_real = tokens(SOURCE, 2), real_tokens(SOURCE, pads)
    masks = {"attention_mask": real, "encoder_attention_mask": source_real} if pads else {}
    out = ours(inputs_embeds=x, encoder_hidden_states=source, **masks).last_hidden_state
    masks = {"tgt_key_padding_mask": ~real, "memory_key_padding_mask": ~source_real} if pads else {}
    compare(ours, theirs, out, theirs(x, source, tgt_mask=causal_mask(LENGTH), **masks), real)


@padded_or_not
@every_norm_and_act
def test_an_encoder_decoder_is_torchs_with_one_table(norm_position, hidden_act, pads):
    """One table embeds both sequences and reads the output, so its gradient has three parts."""
    options = {"vocab_size": 17, "num_decoder_layers": 3, "norm_position": norm_position, "hidden_act": hidden_act}
    ours = build(SubquadForConditionalGeneration, **options)
    encoder = give_weights(ours.encoder, torch_stack("Encoder", norm_position, hidden_act))
    decoder = torch_stack("Decoder", norm_position, hidden_act, layers=3)
    theirs = nn.Transformer(WIDTH, HEADS, batch_first=True, dtype=torch.float64, custom_encoder=encoder, custom_decoder=decoder)
    give_weights(ours.encoder, theirs.encoder)  # building the whole starts them anew
    give_weights(ours.decoder, theirs.decoder)
    table = ours.lm_head.weight.detach().clone().requires_grad_()

    source_ids, target_ids = torch.randint(17, (BATCH, SOURCE)), torch.randint(17, (BATCH, LENGTH))
    source_real, real = real_tokens(SOURCE, pads), real_tokens(LENGTH, pads)
    masks = {"attention_mask": source_real, "decoder_attention_mask": real} if pads else {}
    logits = ours(source_ids, decoder_input_ids=target_ids, **masks).logits
    masks = {"src_key_padding_mask": ~source_real, "tgt_key_padding_mask": ~real} if pads else {}
    masks |= {"memory_key_padding_mask": ~source_real} if pads else {}
    hidden = theirs(table[source_ids], table[target_ids], tgt_mask=causal_mask(LENGTH), **masks)
    expected = hidden @ table.T
    assert_close(logits[real], expected[real])
    pull_back(logits, real)
    pull_back(expected, real)
    assert_close(ours.lm_head.weight.grad, table.grad)
    assert_same_gradients(ours.encoder, theirs.encoder)
    assert_same_gradients(ours.decoder, theirs.decoder)


def linear(p, name, x):
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)


def normed(p, name, x, kind, eps):
    if kind == "rms":
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * p[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]


def attended(p, name, x, real):
    """Dense softmax: 4 heads of 3 channels, two for each of 2 key-value heads."""
    q, k, v = (linear(p, f"{name}.{part}_proj", x).unflatten(-1, (-1, 3)).transpose(1, 2) for part in "qkv")
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = (q @ k.mT / 3**0.5).masked_fill(~real[:, None, None], -torch.inf)
    return linear(p, f"{name}.out_proj", (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


def fed(p, name, x, hidden_act):
    up = linear(p, f"{name}.up_proj", x)
    if hidden_act == "swiglu":
        gate = linear(p, f"{name}.gate_proj", x)
        return linear(p, f"{name}.down_proj", gate * torch.sigmoid(gate) * up)
    return linear(p, f"{name}.down_proj", up * (1 + torch.erf(up / 2**0.5)) / 2 if hidden_act == "gelu" else F.relu(up))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize(("norm", "hidden_act"), [("rms", "swiglu"), ("rms", "gelu"), ("layer", "swiglu"), ("layer", "relu")])
def test_a_block_is_its_formula(norm, hidden_act, norm_position, bias):
    options = {"norm": norm, "hidden_act": hidden_act, "norm_position": norm_position, "attention_bias": bias, "mlp_bias": bias}
    ours = build(**options, num_attention_heads=4, num_key_value_heads=2, head_dim=3, norm_eps=0.03, num_hidden_layers=1)
    p = {name: t.detach().clone().requires_grad_() for name, t in ours.named_parameters()}
    assert ("layers.0.feed_forward.up_proj.bias" in p) == ("layers.0.self_attn.k_proj.bias" in p) == bias
    x, real = tokens(LENGTH, 1), real_tokens(LENGTH, pads=True)

    def attend(x):
        return attended(p, "layers.0.self_attn", x, real)

    def feed(x):
        return fed(p, "layers.0.feed_forward", x, hidden_act)

    def scaled(name, x):
        return normed(p, name, x, norm, 0.03)

    if norm_position == "pre":
        middle = x + attend(scaled("layers.0.self_attn_norm", x))
        expected = scaled("norm", middle + feed(scaled("layers.0.feed_forward_norm", middle)))
    else:
        middle = scaled("layers.0.self_attn_norm", x + attend(x))
        expected = scaled("layers.0.feed_forward_norm", middle + feed(middle))
    out = ours(inputs_embeds=x, attention_mask=real).last_hidden_state
    assert_close(out[real], expected[real])
    pull_back(out, real)
    pull_back(expected, real)
    for name, parameter in ours.named_parameters():  # that of the keys' bias is 0: it moves all scores of a query alike
        torch.testing.assert_close(parameter.grad, p[name].grad, rtol=1e-9, atol=1e-11)
