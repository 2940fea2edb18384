"""A tiny model with random weights of each family, and something for it to read."""

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    DeiTConfig,
    DeiTModel,
    DistilBertConfig,
    DistilBertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

WORDS, LENGTH, CONTEXT = 97, 13, 64
_NAMES = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "max_position_embeddings": CONTEXT}
_GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2}
_IMAGE = {**_SIZES, "num_attention_heads": 3, "image_size": 20, "patch_size": 4}
_BOTH = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
_FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {**_SIZES, **_GROUPED}),
    "mistral": (MistralForCausalLM, MistralConfig, {**_SIZES, **_GROUPED, "sliding_window": None}),
    "mistral with a window": (MistralForCausalLM, MistralConfig, {**_SIZES, **_GROUPED, "sliding_window": 7}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {**_SIZES, **_GROUPED}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": CONTEXT}),
    "gpt2 with layer scales": (
        GPT2LMHeadModel,
        GPT2Config,
        {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": CONTEXT, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {**_SIZES, "num_attention_heads": 3}),
    "bert": (BertModel, BertConfig, {**_SIZES, "num_attention_heads": 3}),
    "roberta": (RobertaModel, RobertaConfig, {**_SIZES, "num_attention_heads": 3}),
    "distilbert": (
        DistilBertModel,
        DistilBertConfig,
        {"dim": 24, "hidden_dim": 32, "n_layers": 3, "n_heads": 3, "max_position_embeddings": CONTEXT},
    ),
    "vit": (ViTModel, ViTConfig, _IMAGE),
    "deit": (DeiTModel, DeiTConfig, _IMAGE),
    "bart": (
        BartForConditionalGeneration,
        BartConfig,
        {**_BOTH, "encoder_attention_heads": 3, "decoder_attention_heads": 2, "max_position_embeddings": CONTEXT},
    ),
    "t5": (
        T5ForConditionalGeneration,
        T5Config,
        {"d_model": 24, "d_kv": 8, "num_layers": 2, "num_heads": 3, "d_ff": 32, "decoder_start_token_id": 0},
    ),
    "whisper": (
        WhisperForConditionalGeneration,
        WhisperConfig,
        {
            **_BOTH, "encoder_attention_heads": 3, "decoder_attention_heads": 3, "num_mel_bins": 8, "max_source_positions": 50,
            "max_target_positions": CONTEXT, "decoder_start_token_id": 1, "begin_suppress_tokens": None,
        },
    ),
}  # fmt: skip
NAMES = tuple(_FAMILIES)
SOFTMAX_ONLY = ("mistral with a window", "t5")  # a window that the model sets, or a bias of positions
ENCODERS = ("bert", "roberta", "distilbert", "vit", "deit")
WITHOUT_MASK = ("vit", "deit", "whisper")
CAUSAL = ("llama", "mistral", "qwen2", "gpt2", "gpt2 with layer scales", "gpt_neox")
SEQ2SEQ = ("bart", "whisper")


def model(name):
    cls, config, options = _FAMILIES[name]
    torch.manual_seed(0)
    return cls(config(**options, **({} if name in ("vit", "deit") else _NAMES))).eval()


def inputs(name):
    """A batch of two; where the model reads text, one of them padded on the side where its family pads."""
    torch.manual_seed(1)
    ids = torch.randint(3, WORDS, (2, LENGTH))
    mask = torch.ones_like(ids)
    if name in ("vit", "deit"):
        return {"pixel_values": torch.randn(2, 3, 20, 20)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 100), "decoder_input_ids": ids}
    if name in CAUSAL or name == "mistral with a window":
        mask[1, :4] = 0
        return {"input_ids": ids, "attention_mask": mask}
    mask[1, 9:] = 0
    decoder = {"decoder_input_ids": ids[:, :7]} if name in ("bart", "t5") else {}
    return {"input_ids": ids, "attention_mask": mask, **decoder}


@torch.no_grad()
def outputs(model, given):
    """Its logits, or last hidden states, at real tokens."""
    found = model(**given)
    rows = found.logits if hasattr(found, "logits") else found.last_hidden_state
    mask = given.get("attention_mask")
    return rows[mask.bool()] if mask is not None and rows.shape[:2] == mask.shape else rows


def generated(model, given, **options):
    read = {name: value for name, value in given.items() if name != "decoder_input_ids"}
    return model.generate(**read, **{"max_new_tokens": 9, "do_sample": False, **options})
