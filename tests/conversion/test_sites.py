"""Which modules of a model are its attention sites, and what happens to attention that cannot be converted."""

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaAttention

import subquad as sq
from subquad.models.converted.sites import sites
from tests.conversion import families

LAYERS = {  # the name of a layer's attention, and its kinds
    "llama": {"layers.{}.self_attn": "causal"},
    "mistral": {"layers.{}.self_attn": "causal"},
    "qwen2": {"layers.{}.self_attn": "causal"},
    "gpt2": {"h.{}.attn": "causal"},
    "gpt_neox": {"layers.{}.attention": "causal"},
    "bert": {"encoder.layer.{}.attention.self": "bidirectional"},
    "roberta": {"encoder.layer.{}.attention.self": "bidirectional"},
    "distilbert": {"transformer.layer.{}.attention": "bidirectional"},
    "vit": {"layers.{}.attention": "bidirectional"},
    "deit": {"layers.{}.attention": "bidirectional"},
}
BOTH = {
    "encoder.layers.{}.self_attn": "bidirectional",
    "decoder.layers.{}.self_attn": "causal",
    "decoder.layers.{}.encoder_attn": "cross",
}
T5 = {
    "encoder.block.{}.layer.0.SelfAttention": "bidirectional",
    "decoder.block.{}.layer.0.SelfAttention": "causal",
    "decoder.block.{}.layer.1.EncDecAttention": "cross",
}


def kinds(model):
    return {site.name: "cross" if site.is_cross else "causal" if site.is_causal else "bidirectional" for site in sites(model)}


@pytest.mark.parametrize("name", families.NAMES)
def test_every_family(name):
    family = name.split(" ")[0]
    stacks = {"bart": BOTH, "whisper": BOTH, "t5": T5}.get(family) or LAYERS[family]
    counts = {stack: 2 if family == "t5" or stack.startswith("encoder.layers") else 3 for stack in stacks}
    expected = {stack.format(layer): kind for stack, kind in stacks.items() for layer in range(counts[stack])}
    assert kinds(families.model(name)) == expected
    assert kinds(families.model(name).base_model) == expected


def test_cross_attention_of_decoders_that_may_have_it():
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 3}
    bert = BertModel(BertConfig(**sizes, is_decoder=True, add_cross_attention=True))
    assert kinds(bert) == {"encoder.layer.0.attention.self": "causal", "encoder.layer.0.crossattention.self": "cross"}
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=24, n_layer=1, n_head=3, vocab_size=97, add_cross_attention=True))
    assert kinds(gpt2) == {"h.0.attn": "causal", "h.0.crossattention": "cross"}


class Direct(LlamaAttention):
    """Declared as attention, and not going through the attention interface."""

    def forward(self, hidden_states, **_):
        return self.o_proj(self.q_proj(hidden_states)), None


class Closed(LlamaAttention):
    """Passes on only the arguments that it knows."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **_):
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values)


def test_attention_beside_the_interface_is_not_converted_silently():
    model = families.model("llama")
    model.model.layers[1].self_attn.__class__ = Direct
    converted = sq.convert(model, "linear")
    with pytest.raises(sq.UnsupportedError, match=r"Direct does not call Hugging Face's attention interface"):
        converted(**families.inputs("llama"))


def test_a_cache_that_does_not_reach_the_mechanism_is_an_error():
    model = families.model("llama")
    model.model.layers[1].self_attn.__class__ = Closed
    converted, given = sq.convert(model, "linear"), families.inputs("llama")
    with pytest.raises(sq.UnsupportedError, match=r"Closed does not pass its arguments on .* use_cache=False"):
        converted(**given)
    assert torch.isfinite(converted(**given, use_cache=False).logits).all()
