"""Where a Hugging Face model attends: the modules whose forward pass goes through the attention interface.

A site is such a module with what a mechanism must know of it: its layer, whether it is causal, whether its keys are those of
another sequence, its heads, and what else its model asks of attention.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from subquad.errors import UnsupportedError
from subquad.families.base import NEEDS, Mechanism

TESTED = (
    "bart", "bert", "deit", "distilbert", "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "roberta", "t5", "vit", "whisper",
)  # fmt: skip
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_CHANNELS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_CROSS = ("encoder_attn", "EncDecAttention", "crossattention")  # what models call the attention to an encoder's output
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# What some models add to the scores: no mechanism has it, softmax included.
_ODD = {"attn_logit_softcapping": "it bends its scores with a soft cap", "sinks": "it learns a sink beside its keys"}


@dataclass(frozen=True)
class Site:
    """One attention.

    Args:
        name: of the module, below the model without its head.
        stack: the part of the name before the layer's number, such as `encoder.layers`.
        has_bias: a bias of relative positions is added to its scores.
        window: of the sliding window that its model has, if any.
    """

    name: str
    module: nn.Module
    stack: str
    layer: int
    is_causal: bool
    is_cross: bool
    heads: int
    kv_heads: int
    head_dim: int
    has_bias: bool
    window: int | None

    def needs(self) -> set[str]:
        """What it asks of a mechanism, in the words of `NEEDS`."""
        asked = {
            "is_causal": self.is_causal,
            "bidirectional": not self.is_causal,
            "cross": self.is_cross,
            "enable_gqa": self.kv_heads != self.heads,
            "attn_mask": self.has_bias or self.window is not None,
        }
        return {need for need, is_asked in asked.items() if is_asked}

    def why_not(self, config: Mechanism) -> list[str]:
        """Every reason why it cannot attend by `config`."""
        reasons = [f"{NEEDS[need]}: {reason}" for need, reason in config.reasons(self.needs()).items()]
        if config.shares_query_and_key:
            reasons.append("one tensor for queries and keys: the model has a projection for each; choose shared_qk=False")
        if config.reads_tokens:
            reasons.append("it reads the tokens themselves, which a model's attention does not hand on")
        if reasons and self.has_bias:
            reasons.append("a bias of relative positions is added to the scores here")
        if reasons and self.window is not None:
            reasons.append(f"the model sees {self.window} tokens back here; config.sliding_window = None would lift that")
        return reasons


def sites(model: PreTrainedModel) -> list[Site]:
    """All of them, in the order of the model's modules; refused where there are none, or one that attends in an odd way."""
    found = found_in(model)
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} ({model.config.model_type}) has no layer whose attention goes through Hugging Face's "
            f"attention interface, so nothing in it can be converted. Tested: {', '.join(TESTED)}."
        )
    return found


def found_in(model: PreTrainedModel) -> list[Site]:
    """As `sites`, where none is no error."""
    return [_site(name, module) for name, module in model.base_model.named_modules() if attends(module)]


def attends(module: nn.Module) -> bool:
    """Whether its own forward pass looks up the attention interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _INTERFACE in code.co_names


def _site(name: str, module: nn.Module) -> Site:
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    config: Any = module.config
    for trait, what in _ODD.items():
        if getattr(module, trait, None) is not None:
            raise UnsupportedError(f"{name} ({type(module).__name__}) cannot be converted: {what}, which no mechanism does.")
    heads = _first(module, config, _HEADS)
    is_cross = bool(getattr(module, "is_cross_attention", False)) or "Cross" in type(module).__name__
    is_cross = is_cross or name.rpartition(".")[2] in _CROSS
    return Site(
        name=name,
        module=module,
        stack=name[: number.start()] if number else name,
        layer=int(number[1]) if number else 0,
        is_causal=bool(getattr(module, "is_causal", False)) and getattr(config, "is_causal", True) and not is_cross,
        is_cross=is_cross,
        heads=heads,
        kv_heads=heads // getattr(module, "num_key_value_groups", 1),
        head_dim=_first(module, config, _CHANNELS),
        has_bias=hasattr(module, "has_relative_attention_bias") and not is_cross,
        window=_window(module, config),
    )


def _first(module: nn.Module, config: object, names: tuple[str, ...]) -> int:
    for place in (module, config):
        for name in names:
            if isinstance(value := getattr(place, name, None), int):
                return value
    raise UnsupportedError(
        f"{type(module).__name__} does not say how many heads and channels it has: it has none of {', '.join(names)}."
    )


def _window(module: nn.Module, config: Any) -> int | None:
    """Models with layers of several kinds have it on the module, others in their config."""
    if hasattr(config, "layer_types") or hasattr(module, "sliding_window"):
        return getattr(module, "sliding_window", None)
    return getattr(config, "sliding_window", None)
