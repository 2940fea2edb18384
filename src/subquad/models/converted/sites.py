"""The attention sites of a Hugging Face model: the modules that can be converted.

A model class declares in `_can_record_outputs` which modules give it attention weights, and of which kind: these are the sites.
A site knows what its mechanism must do: its layer, whether it is causal, whether it attends to another sequence, its heads, and
what its model adds to the scores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
# What some models do to their scores, by the attribute that shows it. No mechanism does it, not even softmax.
_UNSUPPORTED = {"attn_logit_softcapping": "it soft-caps its attention scores", "sinks": "it has learned attention sinks"}


@dataclass(frozen=True)
class Site:
    """One attention.

    Args:
        name: of the module, relative to the model without its head.
        stack: the part of the name before the layer number, such as `encoder.layers`.
        has_bias: whether a bias of relative positions is added to its scores.
        window: the sliding window of its model, if there is one.
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
        """What its mechanism must support, in the words of `NEEDS`."""
        needed = {
            "is_causal": self.is_causal,
            "bidirectional": not self.is_causal,
            "cross": self.is_cross,
            "enable_gqa": self.kv_heads != self.heads,
            "attn_mask": self.has_bias or self.window is not None,
        }
        return {need for need, is_needed in needed.items() if is_needed}

    def why_not(self, mechanism: Mechanism) -> list[str]:
        """Every reason why it cannot use `mechanism`."""
        reasons = [f"{NEEDS[need]}: {reason}" for need, reason in mechanism.reasons(self.needs()).items()]
        if mechanism.shares_query_and_key:
            reasons.append("one tensor for queries and keys: the model has a projection for each; choose shared_qk=False")
        if mechanism.reads_tokens:
            reasons.append("it needs the hidden states, which the model's attention function does not receive")
        if reasons and self.has_bias:
            reasons.append("the model adds a relative position bias to the scores here")
        if reasons and self.window is not None:
            reasons.append(
                f"the model has a sliding window of {self.window} tokens here; config.sliding_window = None removes it"
            )
        return reasons


def sites(model: PreTrainedModel) -> list[Site]:
    """All sites, in the order of the model's modules; an error if there are none, or if one cannot be converted."""
    base = model.base_model
    found = [_site(name, module, is_cross) for name, module, is_cross in _declared(base, base, "")]
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} ({model.config.model_type}) has no attention that goes through Hugging Face's attention "
            f"interface, so nothing in it can be converted. Tested: {', '.join(TESTED)}."
        )
    return found


def _declared(parent: nn.Module, part: PreTrainedModel, prefix: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """Name, module, and whether it is cross-attention, for each attention below `parent`.

    `part` is the innermost Hugging Face model around `parent`: each declares its own modules and not those of a model inside
    it."""
    for name, module in parent.named_children():
        owner = module if isinstance(module, PreTrainedModel) else part
        full = f"{prefix}{name}"
        kinds = _kinds(full, module, owner)
        if kinds and owner._can_set_attn_implementation():
            yield (*_attention_in(full, module), "cross_attentions" in kinds)
        else:
            yield from _declared(module, owner, f"{full}.")


def _kinds(name: str, module: nn.Module, part: PreTrainedModel) -> set[str]:
    """The keys of `_can_record_outputs` that `module` matches, such as "attentions"; matched as transformers does."""
    found = set()
    for key, targets in (part._can_record_outputs or {}).items():
        for target in targets if isinstance(targets, list) else [targets]:
            kind = getattr(target, "target_class", target)
            suffix = getattr(target, "class_name", target)
            layer = (getattr(target, "layer_name", None) or "").strip(".")
            is_target = (isinstance(kind, type) and isinstance(module, kind)) or (
                isinstance(suffix, str) and f".{name}".endswith(suffix)
            )
            if key.endswith("attentions") and is_target and f".{layer}.".replace("..", ".") in f".{name}.":
                found.add(key)
    return found


def _attention_in(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The module itself, or the attention inside it: T5 declares a layer of attention, normalization and dropout."""
    inner = [(child, found) for child, found in module.named_children() if "Attention" in type(found).__name__]
    return (f"{name}.{inner[0][0]}", inner[0][1]) if len(inner) == 1 else (name, module)


def _site(name: str, module: nn.Module, is_cross: bool) -> Site:
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    config: Any = module.config
    for attribute, what in _UNSUPPORTED.items():
        if getattr(module, attribute, None) is not None:
            raise UnsupportedError(
                f"{name} ({type(module).__name__}) cannot be converted: {what}, which no mechanism supports."
            )
    heads = _first(module, config, _HEADS)
    # Some models declare all of their attentions under one key.
    is_cross = is_cross or bool(getattr(module, "is_cross_attention", False)) or "Cross" in type(module).__name__
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
        f"{type(module).__name__} must have its number of heads and channels in an attribute; it has none of "
        f"{', '.join(names)}, and neither does its config."
    )


def _window(module: nn.Module, config: Any) -> int | None:
    """Models whose layers differ have it on the module, others in their config."""
    if hasattr(config, "layer_types") or hasattr(module, "sliding_window"):
        return getattr(module, "sliding_window", None)
    return getattr(config, "sliding_window", None)
