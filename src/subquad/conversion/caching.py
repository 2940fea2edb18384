"""Caches of converted models: `model(..., use_cache=True)` and `model.generate` get a `SubquadCache` without being asked.

Hugging Face's models and `generate` make ordinary caches, of keys and values. A hook before the forward pass puts a
`SubquadCache` in the place of one that is still empty; the model hands it on in its outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from subquad.conversion.record import Record, written
from subquad.errors import InputError
from subquad.models.cache import SubquadCache

_READ = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


def lets_generate(model: PreTrainedModel) -> None:
    """Every part of the model that takes a cache gets the right one."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and "past_key_values" in _names(part):
            part.register_forward_pre_hook(_prepare, with_kwargs=True)


def stop_caching(model: PreTrainedModel) -> None:
    """As before `lets_generate`."""
    for part in model.modules():
        for key, hook in list(part._forward_pre_hooks.items()):
            if hook is _prepare:
                del part._forward_pre_hooks[key], part._forward_pre_hooks_with_kwargs[key]


def _prepare(part: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    conversion = written(part.config)
    if conversion is None or (part.training and torch.is_grad_enabled()):
        return args, kwargs
    given = {**dict(zip(_names(part), args, strict=False)), **kwargs}
    _require_context(conversion, given)
    if not conversion.cache_layers:
        return args, kwargs
    use_cache = given.get("use_cache")
    cache = given.get("past_key_values")
    if cache is None and (part.config.use_cache if use_cache is None else use_cache):
        cache = _new(part)
    elif isinstance(cache, Cache) and not cache.get_seq_length():
        cache = _exchanged(part, cache)
    return (), {**given, "past_key_values": cache}


def _new(part: PreTrainedModel) -> Cache:
    own = SubquadCache(part.config)
    return EncoderDecoderCache(own, DynamicCache(config=part.config)) if part.config.is_encoder_decoder else own


def _exchanged(part: PreTrainedModel, cache: Cache) -> Cache:
    """The empty `cache`, or a `SubquadCache` in its place."""
    if isinstance(cache, EncoderDecoderCache):
        cache.self_attention_cache = _exchanged(part, cache.self_attention_cache)
        return cache
    if isinstance(cache, SubquadCache):
        return cache
    if type(cache) is not DynamicCache:
        raise InputError(
            f"a converted model generates with a SubquadCache; got a {type(cache).__name__}. Leave past_key_values and "
            "cache_implementation out, or pass use_cache=False."
        )
    new = SubquadCache(part.config)
    if any(getattr(layer, "record_past", False) for layer in cache.layers):
        new.activate_past_recording()
    return new


def _require_context(conversion: Record, given: dict[str, Any]) -> None:
    if conversion.context is None or conversion.is_beyond_allowed:
        return
    length = max((given[name].shape[1] for name in _READ if given.get(name) is not None), default=0)
    if length > conversion.context:
        raise InputError(
            f"this model was made for {conversion.context} tokens; got {length}. Shorten the prompt; or, where its positions "
            "reach further, allow it with subquad.convert(..., beyond_context=True), or model.config.subquad"
            "['is_beyond_allowed'] = True, and measure what it does there."
        )


def _names(part: PreTrainedModel) -> tuple[str, ...]:
    """Of the arguments of its forward pass."""
    return _names_of(type(part).forward)


@lru_cache
def _names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
