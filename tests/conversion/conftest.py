"""Folders with a tiny model and a tokenizer of bytes, as `from_pretrained` reads them, and a text to judge by."""

import lzma
import signal

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

CONTEXT = 48


def tokenizer():
    """Bytes behind <pad>, <s> and </s>; with both around a sequence when special tokens are asked for."""
    marks = {"<pad>": 0, "<s>": 1, "</s>": 2}
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), len(marks))}
    plain = Tokenizer(models.BPE(vocab={**marks, **letters}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def sizes():
    return {
        "vocab_size": 259, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 3,
        "max_position_embeddings": CONTEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def spread(model):
    """Scores far enough apart that a swap loses something."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(6)
    return model


def saved(model, path):
    spread(model).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard():
    """Workers that run tests side by side are deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    return saved(LlamaForCausalLM(LlamaConfig(**sizes())), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    torch.manual_seed(0)
    return saved(BertModel(BertConfig(**sizes())), tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="session")
def bart(tmp_path_factory):
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=259, d_model=24, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=3, decoder_attention_heads=3, max_position_embeddings=CONTEXT, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=2,
    )  # fmt: skip
    return saved(BartForConditionalGeneration(config), tmp_path_factory.mktemp("models") / "bart")


@pytest.fixture(scope="session")
def t5(tmp_path_factory):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=259, d_model=24, d_kv=8, num_layers=2, num_heads=3, d_ff=32, pad_token_id=0, decoder_start_token_id=0
    )
    return saved(T5ForConditionalGeneration(config), tmp_path_factory.mktemp("models") / "t5")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Lines of counting, packed."""
    lines = [" ".join(str(start + step * i) for i in range(7)) for start in range(40) for step in range(1, 6)]
    path = tmp_path_factory.mktemp("text") / "counting.txt.xz"
    path.write_bytes(lzma.compress("\n".join(lines).encode()))
    return path
