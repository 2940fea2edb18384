"""Positions: each kind beside its formula and a published model; padding on any side and pieces of a cache move none."""

import math

import pytest
import torch
from torch import nn

import subquad as sq

pytest.importorskip("transformers", reason="pip install 'subquad[hf]', for the models")
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from subquad.models import SubquadCache, SubquadConfig, SubquadForCausalLM, SubquadModel
from subquad.models.configuration import POSITIONS
from subquad.models.positions import Alibi, Learned, RelativeBias, Sinusoidal
from subquad.rotary import rotate
from tests.harness import assert_close, every_default, relative_error

WIDTH, HEADS, VOCABULARY, BATCH, LENGTH = 12, 3, 17, 3, 11
BIASES = ("relative_bias", "alibi")
KINDS = [(kind, method) for kind in POSITIONS for method in ("softmax", "linear") if method == "softmax" or kind not in BIASES]

every_kind = pytest.mark.parametrize(("position", "method"), KINDS)
either_direction = pytest.mark.parametrize("is_decoder", [False, True], ids=["bidirectional", "causal"])


def config(**options):
    sizes = {"hidden_size": WIDTH, "intermediate_size": 19, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    small = {"max_position_embeddings": LENGTH, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 7}
    return SubquadConfig(**{"vocab_size": VOCABULARY, **sizes, **small, **options})


def stirred(model):
    """In float64, with no weight at a special value, and large enough that a position changes what is attended to."""
    with torch.no_grad():
        for parameter in model.double().eval().parameters():
            parameter += torch.randn_like(parameter) / 2
    return model


def build(**options):
    return stirred(SubquadModel(config(**options)))


def ids(length=LENGTH, seed=3):
    return torch.randint(VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def hidden(model, tokens, mask=None, **options):
    return model(tokens, mask, **options).last_hidden_state


def test_sinusoidal_is_the_papers_formula():
    """PE(p, 2c) = sin(p / 10000^(2c/dim)), PE(p, 2c+1) = cos(the same); ours has all sines first."""
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    position = torch.tensor([[0, 1, 7, 1000], [2, 3, 5, 999983]])
    expected = torch.empty_like(x)
    for row, column in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
        p = int(position[row, column])
        angles = [p / 10000 ** (2 * c / WIDTH) for c in range(WIDTH // 2)]
        wave = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        expected[row, column] = math.sqrt(WIDTH) * x[row, column] + torch.tensor(wave, dtype=torch.float64)
    assert_close(Sinusoidal(config())(x, position, 0), expected)


def test_learned_is_a_table():
    learned, x = Learned(config()).double(), torch.randn(2, 4, WIDTH, dtype=torch.float64)
    position = torch.tensor([[0, 1, 2, 10], [3, 3, 4, 5]])
    assert torch.equal(learned(x, position, LENGTH), x + learned.table.weight[position])


@torch.no_grad()
def test_embedded_positions_are_in_the_model():
    for kind in ("sinusoidal", "learned"):
        model, tokens = build(position=kind), ids()
        embedded = model.positions(model.embed_tokens(tokens), torch.arange(LENGTH).expand(BATCH, -1), LENGTH)
        out = model(tokens, output_hidden_states=True)
        assert torch.equal(out.hidden_states[0], embedded)


def t5_bucket(far, each, max_distance):
    """T5's formula in whole numbers: k steps of the way from `exact` to `max_distance`, by factors, without a logarithm."""
    exact = each // 2
    if far < exact:
        return far
    steps = each - exact
    k = sum(far**steps * exact**k >= max_distance**k * exact**steps for k in range(1, steps))
    return exact + k


@either_direction
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 64), (8, 7), (12, 27), (64, 512), (20, 100)])
def test_buckets_are_t5s(buckets, max_distance, is_decoder):
    sizes = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": max_distance}
    found = RelativeBias(config(is_decoder=is_decoder, **sizes)).bucket(torch.arange(-600, 601))
    each = buckets if is_decoder else buckets // 2
    for distance, bucket in zip(range(-600, 601), found.tolist(), strict=True):
        far = max(-distance, 0) if is_decoder else abs(distance)
        assert bucket == t5_bucket(far, each, max_distance) + (each if distance > 0 and not is_decoder else 0)
    published = T5Attention._relative_position_bucket(
        torch.arange(-600, 601), bidirectional=not is_decoder, num_buckets=buckets, max_distance=max_distance
    )
    assert torch.equal(found, published)
    assert len(set(found.tolist())) == buckets - (not is_decoder)  # both ways, 0 is taken once


def test_a_border_belongs_to_the_farther_bucket():
    """5 (160/5)^(1/5) = 10 exactly. T5's float32 has these right, and others wrong, such as 54 of 48 buckets up to 81."""
    buckets = {"relative_attention_num_buckets": 10, "relative_attention_max_distance": 160}
    found = RelativeBias(config(is_decoder=True, **buckets)).bucket(-torch.tensor([10, 20, 40, 80]))
    assert found.tolist() == [6, 7, 8, 9]


def test_few_buckets_and_short_distances_are_refused():
    with pytest.raises(sq.InputError, match=r"relative_attention_num_buckets must be even and at least 4; got 2"):
        build(position="relative_bias", relative_attention_num_buckets=2)
    with pytest.raises(sq.InputError, match=r"relative_attention_max_distance must be above .*, 2; got 2"):
        build(position="relative_bias", relative_attention_max_distance=2)


def dense_self_attention(model, tokens, bias, is_causal):
    """What the self-attention of the first layer adds, by dense softmax with an explicit bias (H, N, N)."""
    block = model.layers[0]
    x = block.self_attn_norm(model.embed_tokens(tokens))
    attention = block.self_attn
    q, k, v = (getattr(attention, f"{n}_proj")(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
    scores = q @ k.mT / math.sqrt(WIDTH // HEADS) + bias
    if is_causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    return attention.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


def explicit_bias(model, position, is_decoder):
    """The bias of every pair of places, one by one."""
    bias = torch.zeros(HEADS, LENGTH, LENGTH, dtype=torch.float64)
    for i in range(LENGTH):
        for j in range(LENGTH):
            if position == "alibi":
                bias[:, i, j] = torch.tensor([-m * abs(i - j) for m in (2**-4, 2**-8, 2**-2)])
            else:
                each = 8 if is_decoder else 4
                far = max(i - j, 0) if is_decoder else abs(i - j)
                bucket = t5_bucket(far, each, 7) + (each if j > i and not is_decoder else 0)
                bias[:, i, j] = model.bias.table.weight[bucket]
    return bias


@either_direction
@pytest.mark.parametrize("position", BIASES)
@torch.no_grad()
def test_a_bias_is_added_to_the_scores(position, is_decoder):
    model, tokens = build(position=position, is_decoder=is_decoder, num_hidden_layers=1), ids()
    block = model.layers[0]
    expected = dense_self_attention(model, tokens, explicit_bias(model, position, is_decoder), is_decoder)
    middle = model.embed_tokens(tokens) + expected
    expected = model.norm(middle + block.feed_forward(block.feed_forward_norm(middle)))
    assert_close(hidden(model, tokens), expected)
    model.bias = None
    assert relative_error(hidden(model, tokens), expected) > 1e-3


def test_the_bias_is_learned_by_all_layers():
    """One table: moving it changes every layer, and its gradient is there."""
    model = build(position="relative_bias", is_decoder=True)
    tables = [name for name, p in model.named_parameters() if p.shape == (8, HEADS)]
    assert tables == ["bias.table.weight"]
    hidden(model, ids()).square().mean().backward()
    assert (model.bias.table.weight.grad[:5] != 0).all()


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12])
def test_alibis_slopes_are_blooms(heads):
    slopes = Alibi(config(hidden_size=24, num_attention_heads=heads)).slopes()
    published = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)[:, 0, 1]  # position 1: the slope itself
    torch.testing.assert_close(torch.tensor(slopes, dtype=torch.float64), published, rtol=1e-6, atol=0)


def test_alibis_bias_has_the_precision_of_the_model():
    """12 heads have slopes such as 2^-0.5, which float32 rounds."""
    alibi = Alibi(config(num_attention_heads=12)).double()
    found = alibi(torch.tensor([[9]]), torch.tensor([[0]]), torch.float64).double().flatten()
    assert_close(found, torch.tensor(alibi.slopes(), dtype=torch.float64) * -9)


class WideRotary(nn.Module):
    """Llama's angles in float64; its own are in float32 in any model."""

    def __init__(self, base, dim):
        super().__init__()
        self.frequency = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))

    def forward(self, x, position_ids):
        angle = position_ids.unsqueeze(-1).double() * self.frequency
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()


def test_rotary_is_llamas():
    q, k = torch.randn(BATCH, 5, LENGTH, 6, dtype=torch.float64), torch.randn(BATCH, 2, LENGTH, 6, dtype=torch.float64)
    position = torch.randint(5000, (BATCH, LENGTH))
    expected = apply_rotary_pos_emb(q, k, *WideRotary(777.0, 6)(q, position))
    for found, published in zip((rotate(q, position, 777.0), rotate(k, position, 777.0)), expected, strict=True):
        assert_close(found, published)


def llama(layers=2):
    sizes = {"hidden_size": 24, "intermediate_size": 19, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
    rope = {"rope_type": "default", "rope_theta": 77.0}
    return stirred(LlamaForCausalLM(LlamaConfig(**sizes, **heads, rms_norm_eps=0.02, rope_parameters=rope)))


def widened(published):
    """Without its float32 pieces, the norms and the angles."""
    for module in list(published.modules()):
        for name, child in module.named_children():
            if isinstance(child, LlamaRMSNorm):
                wide = nn.RMSNorm(len(child.weight), eps=child.variance_epsilon)
                wide.weight = child.weight
                setattr(module, name, wide)
    published.model.rotary_emb = WideRotary(77.0, 10)
    return published


def ours_like(published):
    """Every weight of Llama's, under our names."""
    layers = published.config.num_hidden_layers
    sizes = {"hidden_size": 24, "num_hidden_layers": layers, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
    style = {"norm": "rms", "norm_eps": 0.02, "hidden_act": "swiglu", "attention_bias": False, "mlp_bias": False}
    ours = SubquadForCausalLM(config(**sizes, **style, position="rotary", rope_theta=77.0, tie_word_embeddings=False))
    renamed = {
        "input_layernorm": "self_attn_norm",
        "post_attention_layernorm": "feed_forward_norm",
        "o_proj": "out_proj",
        "mlp": "feed_forward",
    }
    weights = {}
    for name, weight in published.state_dict().items():
        weights[".".join(renamed.get(part, part) for part in name.split("."))] = weight
    ours.double().eval().load_state_dict(weights)
    return ours


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("pads", [False, True], ids=["unpadded", "left-padded"])
@torch.no_grad()
def test_a_causal_model_is_llama(pads, layers):
    published = llama(layers)
    ours, real = ours_like(published), torch.ones(BATCH, LENGTH, dtype=torch.int64)
    if pads:
        real[1, :4], real[2, :1] = 0, 0
    position = (real.cumsum(1) - 1).clamp(min=0)
    found = ours(ids(), real).logits[real.bool()]
    expected = published(ids(), attention_mask=real, position_ids=position).logits[real.bool()]
    assert relative_error(found, expected) < 1e-5  # its norms and angles are in float32
    expected = widened(published)(ids(), attention_mask=real, position_ids=position).logits[real.bool()]
    assert_close(found, expected)


def real_tokens(pads, side="left", length=LENGTH):
    """The mask with `pads[row]` pads on that side of each row, or inside it, which moves even what counts distances."""
    first = {"left": lambda _: 0, "right": lambda count: length - count, "inside": lambda _: 2}[side]
    place = torch.arange(length)
    return torch.stack([(place < first(count)) | (place >= first(count) + count) for count in pads])


@either_direction
@pytest.mark.parametrize("side", ["left", "right", "inside"])
@every_kind
@torch.no_grad()
def test_padding_moves_no_position(position, method, side, is_decoder):
    model, tokens, real = build(position=position, method=method, is_decoder=is_decoder), ids(), real_tokens((4, 0, 1), side)
    found = hidden(model, tokens, real.long())
    for row in range(BATCH):
        alone = hidden(model, tokens[row, real[row]][None])
        assert_close(found[row, real[row]], alone[0])


@every_kind
@torch.no_grad()
def test_positions_tell_orders_apart(position, method):
    """The last token of a causal model sees the same set of tokens, in another order."""
    model, tokens = build(position=position, method=method, is_decoder=True, num_hidden_layers=1), ids()
    swapped = torch.cat([tokens[:, :-1].flip(1), tokens[:, -1:]], dim=1)
    error = relative_error(hidden(model, swapped)[:, -1], hidden(model, tokens)[:, -1])
    assert error < 1e-12 if position == "none" else error > 1e-3


@pytest.mark.parametrize("pads", [(0, 0, 0), (4, 0, 1)], ids=["unpadded", "left-padded"])
@every_kind
@torch.no_grad()
def test_positions_go_on_across_pieces(position, method, pads):
    """A piece of 2, in which a row has nothing but pads, then others; a token at a time is among them."""
    model = build(position=position, method=method, is_decoder=True)
    tokens, real = ids(), real_tokens(pads)
    is_padded = not bool(real.all())
    expected = hidden(model, tokens, real if is_padded else None)
    cache, pieces, done = SubquadCache(model.config), [], 0
    for size in (2, 1, 5, 1, 2):
        mask = real[:, : done + size].long() if is_padded else None
        pieces.append(hidden(model, tokens[:, done : done + size], mask, past_key_values=cache))
        done += size
    assert_close(torch.cat(pieces, dim=1)[real], expected[real])
    assert cache.position.value.tolist() == real.sum(1).tolist()


@every_kind
@torch.no_grad()
def test_a_padded_cache_goes_on_without_a_mask_or_refuses(position, method):
    """The cache counts real tokens by itself; only a bias must know where the pads are."""
    model = build(position=position, method=method, is_decoder=True)
    tokens, real = ids(), real_tokens((4, 0, 1))
    expected, cache = hidden(model, tokens, real), SubquadCache(model.config)
    hidden(model, tokens[:, :9], real[:, :9], past_key_values=cache)
    if position in BIASES:
        with pytest.raises(sq.InputError, match=r"the cache has seen pads\. Pass the attention_mask of all tokens"):
            hidden(model, tokens[:, 9:], past_key_values=cache)
        assert cache.get_seq_length() == 9
    else:
        found = hidden(model, tokens[:, 9:], past_key_values=cache)
        assert_close(found, expected[:, 9:])


@pytest.mark.parametrize("position", BIASES)
@every_default()
def test_a_bias_is_refused_where_there_are_no_scores(case, position):
    is_decoder = bool(case.why_not(bidirectional=True))
    if not case.why_not(attn_mask=True):
        assert config(method=case.mechanism, position=position, is_decoder=is_decoder).position == position
        return
    with pytest.raises(sq.UnsupportedError) as error:
        config(method=["softmax", case.mechanism], position=position, is_decoder=is_decoder)
    message = str(error.value)
    assert f"position={position!r}" in message
    assert f"{case.info.name} cannot take (layer 1)" in message
    assert case.mechanism.reasons(["attn_mask"])["attn_mask"] in message


def test_most_methods_have_no_scores():
    assert len(sq.methods()) - len(sq.methods(attn_mask=True)) > 10


LONG = r"max_position_embeddings=11 positions; got a sequence of 12 tokens"


@torch.no_grad()
def test_a_sequence_longer_than_the_table_is_refused():
    model = build(position="learned")
    hidden(model, ids(11))
    with pytest.raises(sq.InputError, match=LONG):
        hidden(model, ids(12))


@torch.no_grad()
def test_decoding_past_the_table_is_refused():
    model = build(position="learned", is_decoder=True)
    cache = SubquadCache(model.config)
    hidden(model, ids(10), past_key_values=cache)
    hidden(model, ids(1), past_key_values=cache)
    with pytest.raises(sq.InputError, match=LONG):
        hidden(model, ids(1), past_key_values=cache)
    assert cache.get_seq_length() == 11


@torch.no_grad()
def test_pads_take_no_place_in_the_table():
    model, tokens, real = build(position="learned", is_decoder=True), ids(16), real_tokens((5, 8, 6), length=16)
    expected = hidden(model, tokens[:1, 5:])
    assert_close(hidden(model, tokens, real)[:1, 5:], expected)
    cache = SubquadCache(model.config)
    hidden(model, tokens[:, :12], real[:, :12], past_key_values=cache)
    assert_close(hidden(model, tokens[:, 12:], real, past_key_values=cache)[:1], expected[:, 7:])
    one_more = torch.cat([real, torch.ones(BATCH, 1, dtype=torch.bool)], dim=1)
    with pytest.raises(sq.InputError, match=LONG):
        hidden(model, ids(1), one_more, past_key_values=cache)


def test_rotary_needs_pairs_of_channels():
    for model in (SubquadModel, SubquadForCausalLM):
        with pytest.raises(sq.InputError, match=r"head_dim must be even; got 5"):
            model(config(head_dim=5, position="rotary"))
    assert SubquadModel(config(head_dim=5, position="none")).layers[0].self_attn.rotary is None
