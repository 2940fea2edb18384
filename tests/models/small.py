"""Small models with every mechanism, for the tests beside this file."""

import pytest
import torch

import subquad as sq
from subquad.mechanisms import MECHANISMS
from subquad.models import SubquadConfig, SubquadForCausalLM, SubquadForConditionalGeneration
from tests.options import small

SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "initializer_range": 0.3,  # so that logits differ enough for one token to win clearly
}
# The default stride is the root of the length: no causal form, and no padding.
_OPTIONS = {"sparse_strided": {"stride": 5}, "sparse_fixed": {"stride": 5}}
METHODS = [cls(**{**small(cls.info.name), **_OPTIONS.get(cls.info.name, {})}) for cls in MECHANISMS]
DECODABLE = [method for method in METHODS if not sq.why_not(method, is_causal=True, decode=True)]
CROSS = [method for method in METHODS if not sq.why_not(method, decoder_cross=True)]


def every(methods, name="method"):
    return pytest.mark.parametrize(name, methods, ids=lambda method: method.info.name)


def config(method="softmax", **fields):
    return SubquadConfig(**{**SIZES, "method": method, **fields})


def causal_lm(method="softmax", *, seed=0, dtype=torch.float64, **fields):
    torch.manual_seed(seed)
    return SubquadForCausalLM(config(method, **fields)).to(dtype).eval()


def translator(method="softmax", *, seed=0, dtype=torch.float64, **fields):
    torch.manual_seed(seed)
    return SubquadForConditionalGeneration(config(method, **fields)).to(dtype).eval()


def tokens(batch=3, length=13, *, seed=1):
    """Ids without the special ones, and a mask that pads the first rows on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, SIZES["vocab_size"], (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, pads in enumerate((4, 1)[: batch - 1]):
        mask[row, :pads] = 0
    return ids.masked_fill(mask == 0, SIZES["pad_token_id"]), mask
