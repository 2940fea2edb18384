"""Caches of converted models.

`model(..., use_cache=True)` and `model.generate` make a `SubquadCache` where Hugging Face would make a cache of keys and
values, and refuse other caches. Around each causal attention module, hooks pass its layer of the cache to its mechanism: in the
argument `subquad_cache_layer`, which attention modules hand on to the attention function as they do with all arguments that
they do not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from subquad.errors import InputError, UnsupportedError
from subquad.models.cache import ConvertedLayer, SubquadCache
from subquad.models.converted import record
from subquad.models.converted.record import ConversionRecord
from subquad.models.converted.sites import Site

_LAYER = "subquad_cache_layer"  # the argument of the attention function
_INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
_MAKE_CACHE = "_prepare_cache_for_generation"  # the method of a model that `generate` calls


def use_subquad_caches(model: PreTrainedModel, sites: list[Site]) -> None:
    """Give the right cache to each part of the model that takes one, and to each causal site."""
    use_ordinary_caches(model)  # so that no hook is registered twice
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and "past_key_values" in _argument_names(part):
            part.register_forward_pre_hook(_provide_cache, with_kwargs=True)
            if part.can_generate():
                setattr(part, _MAKE_CACHE, partial(_make_cache, part))
    for site in sites:
        if site.is_causal:
            site.module.register_forward_pre_hook(_pass_layer, with_kwargs=True)
            site.module.register_forward_hook(_release_layer, with_kwargs=True, always_call=True)


def use_ordinary_caches(model: PreTrainedModel) -> None:
    """Undo `use_subquad_caches`."""
    for part in model.modules():
        vars(part).pop(_MAKE_CACHE, None)
        for key, hook in list(part._forward_pre_hooks.items()):
            if hook in (_provide_cache, _pass_layer):
                del part._forward_pre_hooks[key], part._forward_pre_hooks_with_kwargs[key]
        for key, hook in list(part._forward_hooks.items()):
            if hook is _release_layer:
                del part._forward_hooks[key], part._forward_hooks_with_kwargs[key], part._forward_hooks_always_called[key]


class SubquadEncoderDecoderCache(EncoderDecoderCache):
    """Decode states of the decoder's self-attention, and keys and values of the encoder's output."""

    def __init__(self, part: PreTrainedModel) -> None:
        super().__init__(SubquadCache(part.config), DynamicCache(config=part.config))

    def check_dynamic_cache(self, method: str) -> None:
        """Both caches can do all that a `DynamicCache` can."""


def _pass_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layer = _layer_for(module, args, kwargs)
    if layer is None:
        return None
    layer.expects = "keys"
    return args, {**kwargs, _LAYER: layer}


def _release_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Called after an error, too; the output is None then."""
    layer: ConvertedLayer | None = kwargs.get(_LAYER)
    if layer is None:
        return
    is_lost = layer.expects == "state"
    layer.expects = "nothing"
    if is_lost and output is not None:
        raise UnsupportedError(
            f"{type(module).__name__} does not pass its arguments on to the attention function, so its mechanism cannot "
            "continue from a cache. Call with use_cache=False."
        )


def _layer_for(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ConvertedLayer | None:
    """The layer of the `SubquadCache` among the arguments; models have several names for that argument."""
    cache = next((value for value in (*kwargs.values(), *args) if isinstance(value, Cache)), None)
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    index = getattr(module, "layer_idx", None)
    if not isinstance(own, SubquadCache) or index is None or index >= len(own.layers):
        return None
    layer = own.layers[index]
    return layer if isinstance(layer, ConvertedLayer) else None


def _provide_cache(part: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    conversion = record.installed(part.config)
    if conversion is None or (part.training and torch.is_grad_enabled()):
        return None
    given = {**dict(zip(_argument_names(part), args, strict=False)), **kwargs}
    _require_context(conversion, given)
    if not conversion.cache_layers:
        return None
    use_cache = given.get("use_cache")
    cache = given.get("past_key_values")
    if cache is not None:
        _require_states(cache)
    elif part.config.use_cache if use_cache is None else use_cache:
        cache = _new_cache(part)
    return (), {**given, "past_key_values": cache}


def _make_cache(part: PreTrainedModel, generation: GenerationConfig, given: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    conversion = record.installed(part.config)
    if conversion is None or not conversion.cache_layers:
        getattr(type(part), _MAKE_CACHE)(part, generation, given, *args, **kwargs)
        return
    if generation.cache_implementation not in (None, "dynamic"):
        raise InputError(
            "a converted model generates with a SubquadCache, which is as large as the states of its mechanisms; "
            f"got cache_implementation={generation.cache_implementation!r}. Leave it out."
        )
    if given.get("past_key_values") is not None:
        _require_states(given["past_key_values"])
    elif generation.use_cache is not False:
        given["past_key_values"] = _new_cache(part)
        if generation.is_assistant:
            given["past_key_values"].activate_past_recording()


def _new_cache(part: PreTrainedModel) -> Cache:
    return SubquadEncoderDecoderCache(part) if part.config.is_encoder_decoder else SubquadCache(part.config)


def _require_states(cache: Cache) -> None:
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if not isinstance(own, SubquadCache):
        raise InputError(
            f"a converted model caches decode states of its mechanisms; got a {type(own).__name__} for past_key_values. "
            "Leave it out, and pass the past_key_values that the model returns; or start with SubquadCache(model.config)."
        )


def _require_context(conversion: ConversionRecord, given: dict[str, Any]) -> None:
    if conversion.context is None or conversion.beyond_context:
        return
    length = max((given[name].shape[1] for name in _INPUTS if given.get(name) is not None), default=0)
    if length > conversion.context:
        raise InputError(
            f"this model was trained for {conversion.context} tokens; got {length}. Shorten the prompt. If its positions "
            "reach further, allow it with subquad.convert(..., beyond_context=True), or with model.config.subquad"
            "['beyond_context'] = True, and measure the result."
        )


def _argument_names(part: PreTrainedModel) -> tuple[str, ...]:
    """Of its forward pass."""
    return _names_of(type(part).forward)


@lru_cache
def _names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
