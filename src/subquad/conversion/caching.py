"""Caches of converted models: `model(..., use_cache=True)` and `model.generate` get a `SubquadCache` without being asked.

Hugging Face's models and `generate` would make ordinary caches, of keys and values. `generate` asks the model for its cache; a
hook before the forward pass makes one where none is given, and refuses what is given and holds no states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from subquad.conversion.record import Record, written
from subquad.errors import InputError
from subquad.models.cache import SubquadCache

_READ = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
_GENERATES = "_prepare_cache_for_generation"  # what `generate` asks


def lets_generate(model: PreTrainedModel) -> None:
    """Every part of the model that takes a cache gets the right one."""
    stop_caching(model)  # in a part that was there before
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and "past_key_values" in _names(part):
            part.register_forward_pre_hook(_prepare, with_kwargs=True)
            if part.can_generate():
                setattr(part, _GENERATES, partial(_prepare_generation, part))


def stop_caching(model: PreTrainedModel) -> None:
    """As before `lets_generate`."""
    for part in model.modules():
        vars(part).pop(_GENERATES, None)
        for key, hook in list(part._forward_pre_hooks.items()):
            if hook is _prepare:
                del part._forward_pre_hooks[key], part._forward_pre_hooks_with_kwargs[key]


class TwoCaches(EncoderDecoderCache):  # type: ignore[misc]
    """States of the decoder's own tokens, and keys and values of what the encoder has read."""

    def __init__(self, part: PreTrainedModel) -> None:
        super().__init__(SubquadCache(part.config), DynamicCache(config=part.config))

    def check_dynamic_cache(self, method: str) -> None:
        """Both can do all that a `DynamicCache` can."""


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
    if cache is not None:
        _require_states(cache)
    elif part.config.use_cache if use_cache is None else use_cache:
        cache = _new(part)
    return (), {**given, "past_key_values": cache}


def _prepare_generation(
    part: PreTrainedModel, config: GenerationConfig, given: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    conversion = written(part.config)
    if conversion is None or not conversion.cache_layers:
        getattr(type(part), _GENERATES)(part, config, given, *args, **kwargs)
        return
    if config.cache_implementation not in (None, "dynamic"):
        raise InputError(
            "a converted model generates with a SubquadCache, whose size is that of its mechanisms' states; "
            f"got cache_implementation={config.cache_implementation!r}. Leave it out."
        )
    if given.get("past_key_values") is not None:
        _require_states(given["past_key_values"])
    elif config.use_cache is not False:
        given["past_key_values"] = _new(part)
        if config.is_assistant:
            given["past_key_values"].activate_past_recording()


def _new(part: PreTrainedModel) -> Cache:
    return TwoCaches(part) if part.config.is_encoder_decoder else SubquadCache(part.config)


def _require_states(cache: Cache) -> None:
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if not isinstance(own, SubquadCache):
        raise InputError(
            f"a converted model remembers by states of its mechanisms; got a {type(own).__name__} for past_key_values. "
            "Leave it out, and go on from the past_key_values that the model gives; or begin with SubquadCache(model.config)."
        )


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
