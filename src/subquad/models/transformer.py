"""`SubquadModel`: embeddings, positions, blocks. An encoder; with `is_decoder`, a causal decoder with a cache.

B batch, N tokens, M tokens of an encoder's output.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import can_return_tuple

from subquad import checks
from subquad.attention import MechanismModule
from subquad.errors import InputError, StateError
from subquad.models import inputs, weight_files, weights
from subquad.models.block import Block, norm
from subquad.models.cache import SubquadCache, Update
from subquad.models.configuration import SubquadConfig
from subquad.models.positions import BIASES, EMBEDDED
from subquad.rotary import Rotation, positions, tables

_ADVICE = (
    "Load with the class and config that saved them. Or pass strict=False to initialize missing weights and ignore unexpected "
    "ones, and ignore_mismatched_sizes=True to initialize those of another shape."
)


class SubquadPreTrainedModel(PreTrainedModel):
    """What all subquad models have in common: initial weights, and strict loading."""

    config_class = SubquadConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _no_split_modules = ("Block",)
    _skip_keys_device_placement = ("past_key_values",)

    takes_source = False

    def __init__(self, config: SubquadConfig, **fields: Any) -> None:
        """`fields` are set in a copy of the config; without them the config is shared, with the model inside as well."""
        if not isinstance(config, SubquadConfig):
            raise InputError(f"{type(self).__name__} takes a SubquadConfig; got {type(config).__name__}.")
        config = config.changed(**fields) if fields else config
        config.check_model()
        if config.add_cross_attention and not self.takes_source:
            raise InputError(
                f"{type(self).__name__} has no source to attend to; got add_cross_attention=True. Leave it out, or use "
                "SubquadForConditionalGeneration, which has an encoder, or SubquadModel."
            )
        super().__init__(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MechanismModule):
            for name, initial in module.initial_weights().items():
                init.copy_(getattr(module, name), initial)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], *args: Any, strict: bool = True, **kwargs: Any) -> Any:
        """As Hugging Face's, except that it loads only safetensors, and that missing weights, unexpected weights and weights
        of the wrong shape are errors.

        Args:
            strict: False initializes missing weights and ignores unexpected ones, for example to put a new head on a trained
        model."""
        wants_info = kwargs.pop("output_loading_info", False)
        may_differ = kwargs.pop("ignore_mismatched_sizes", False)
        given = {**weight_files.safe_arguments(kwargs), "output_loading_info": True, "ignore_mismatched_sizes": True}
        with weight_files.loading(path, kwargs.get("subfolder")):
            model, info = super().from_pretrained(path, *args, **given)
        found = weights.mismatches(info)
        if strict is False:
            found = {"of another shape": found["of another shape"]}
        if may_differ:
            found.pop("of another shape")
        weights.refuse(found, cls.__name__, path, _ADVICE)
        weights.finish_loading(model)
        return (model, info) if wants_info else model


class SubquadModel(SubquadPreTrainedModel):
    """A stack of blocks over embedded tokens: an encoder, or with `config.is_decoder` a decoder."""

    takes_source = True

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        if config.is_encoder_decoder:
            raise InputError(
                "SubquadModel is an encoder or a decoder; got a config with is_encoder_decoder=True. Use "
                "SubquadForConditionalGeneration, whose encoder and decoder are SubquadModels."
            )
        self.embed_tokens = (
            None if config.vocab_size is None else nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        )
        self.positions = EMBEDDED[config.position](config) if config.position in EMBEDDED else None
        self.bias = BIASES[config.position](config) if config.position in BIASES else None
        self.dropout = nn.Dropout(config.dropout)
        across = config.cross_methods if config.add_cross_attention else [None] * config.num_hidden_layers
        self.layers = nn.ModuleList(Block(config, *pair) for pair in zip(config.self_methods, across, strict=True))
        self.norm = norm(config) if config.norm_position == "pre" else None
        self.gradient_checkpointing = False
        _share_parameters(self.layers)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: SubquadCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Hidden states (B, N, hidden_size) of `input_ids` (B, N), or of `inputs_embeds`.

        Args:
            attention_mask: (B, past + N), 1 for real tokens and 0 for pads, on any side.
            encoder_hidden_states, encoder_attention_mask: (B, M, hidden_size) and (B, M), for cross-attention.
            past_key_values: a `SubquadCache` of the earlier tokens; it is updated with these.
            use_cache: return a cache; by default a decoder does so in evaluation mode.
        """
        config = self.config
        inputs.tokens("input_ids", input_ids, inputs_embeds, self.vocabulary)
        inputs.cache(past_key_values, config.num_hidden_layers, config.is_decoder, use_cache)
        _refuse_attentions(output_attentions, config)
        if self.embed_tokens is not None and input_ids is not None:
            inputs_embeds = self.embed_tokens(input_ids)
        assert inputs_embeds is not None
        checks.tokens("inputs_embeds", inputs_embeds, config.hidden_size, next(self.parameters()))
        past = self._cache(past_key_values, use_cache)
        batch, length = inputs_embeds.shape[:2]
        seen = 0 if past is None else past.get_seq_length()
        source_mask = self._check_source(encoder_hidden_states, encoder_attention_mask, batch, past)

        start = None if past is None else past.position.value
        start = torch.zeros(batch, dtype=torch.int64, device=inputs_embeds.device) if start is None else start
        if start.shape[0] != batch:
            raise StateError(
                f"a cache continues with the batch size that it has, {start.shape[0]}; got {batch}. "
                "Choose rows with cache.batch_select_indices(...), or start with a new SubquadCache."
            )
        mask = inputs.padding("attention_mask", attention_mask, (batch, length), seen, start if seen else None)
        position, after = positions(start, length, mask)
        x = inputs_embeds if self.positions is None else self.positions(inputs_embeds, position, seen + length)
        bias = self._bias(position, seen, attention_mask, start, x.dtype)
        rotation = None
        if config.position == "rotary":
            head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
            rotation = Rotation(*tables(position, head_dim, config.rope_theta, x.dtype), after)

        x = self.dropout(x)
        hidden: list[Tensor] = [x]
        caches = [None] * len(self.layers) if past is None else past.layers
        updates = []
        for block, layer in zip(self.layers, caches, strict=True):
            x, *update = block(
                x,
                key_padding_mask=mask,
                bias=bias,
                cache=layer,
                source=encoder_hidden_states,
                source_mask=source_mask,
                rotation=rotation,
            )
            hidden.append(x)
            updates.append(update)
        if self.norm is not None:
            x = hidden[-1] = self.norm(x)
        if past is not None:  # only now, so that a refused call changes nothing
            for layer, (update, source) in zip(past.layers, updates, strict=True):
                layer.past.apply(update)
                layer.source = source
            past.position.apply(Update(after, length, lambda keep: _after(start, keep, mask)))
        shows_hidden = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x, past_key_values=past, hidden_states=tuple(hidden) if shows_hidden else None
        )

    @property
    def vocabulary(self) -> int | None:
        """The number of token ids; it changes when embeddings are resized."""
        return None if self.embed_tokens is None else self.embed_tokens.num_embeddings

    def _cache(self, past: SubquadCache | None, use_cache: bool | None) -> SubquadCache | None:
        if use_cache is None:
            use_cache = past is not None or (self.config.is_decoder and self.config.use_cache and not self.training)
        if past is not None and not use_cache:
            raise InputError(
                "got past_key_values and use_cache=False, but a cache that is passed is updated. Leave one of them out."
            )
        if not use_cache:
            return None
        if self.training and any(layer.gradient_checkpointing for layer in self.layers):
            raise InputError(
                "gradient checkpointing computes states twice, so it cannot use a cache. Pass use_cache=False, or call eval()."
            )
        return SubquadCache(self.config) if past is None else past

    def _check_source(self, source: Tensor | None, mask: Tensor | None, batch: int, past: SubquadCache | None) -> Tensor | None:
        cached = None if past is None else past.layers[0].source
        if not self.config.add_cross_attention:
            if source is not None or mask is not None:
                raise InputError(
                    "this model has no cross-attention; got encoder_hidden_states. Leave them out, or set add_cross_attention."
                )
            return None
        if source is None:
            if cached is not None:
                return None
            raise InputError("this model attends to the output of an encoder; got none. Pass encoder_hidden_states.")
        if not isinstance(source, Tensor) or source.dim() != 3 or source.shape[0] != batch:
            came = tuple(source.shape) if isinstance(source, Tensor) else type(source).__name__
            raise InputError(f"encoder_hidden_states must be (batch, tokens, width), with batch {batch}; got {came}.")
        if cached is not None and cached.key.shape[2] != source.shape[1]:
            raise InputError(
                f"the cache holds a source of {cached.key.shape[2]} tokens; got another of {source.shape[1]}. "
                "Start with a new SubquadCache for a new source."
            )
        return inputs.padding("encoder_attention_mask", mask, (batch, source.shape[1]))

    def _bias(
        self, position: Tensor, seen: int, attention_mask: Tensor | None, start: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        """The bias that the positions add to the scores, (B or 1, H, N, past + N)."""
        if self.bias is None:
            return None
        if attention_mask is None:
            if seen and bool((start != seen).any()):
                raise InputError("the cache has seen pads. Pass the attention_mask of all tokens, (batch, past + new).")
            query = torch.arange(seen, seen + position.shape[1], device=position.device)[None]
            key = torch.arange(seen + position.shape[1], device=position.device)[None]
            return self.bias(query, key, dtype)
        key = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        return self.bias(key[:, seen:], key, dtype)


def _after(start: Tensor, keep: int, mask: Tensor | None) -> Tensor:
    return positions(start, keep, None if mask is None else mask[:, :keep])[1]


def _refuse_attentions(output_attentions: bool | None, config: SubquadConfig) -> None:
    if config.output_attentions if output_attentions is None else output_attentions:
        raise InputError(
            "output_attentions needs the weight of every query and key, which these mechanisms never compute. Leave it out; "
            "`subquad show` draws which tokens attend to which."
        )


def _share_parameters(layers: nn.ModuleList) -> None:
    """Mechanisms that share their parameters across layers use those of the first such layer."""
    for kind in ("self_attn", "cross_attn"):
        lenders: list[MechanismModule] = []
        for layer in layers:
            attention = getattr(layer, kind)
            if attention is None or not attention.mechanism.method.shares_parameters:
                continue
            mechanism = attention.mechanism
            lender = next((m for m in lenders if m.method == mechanism.method), None)
            if lender is None:
                lenders.append(mechanism)
            else:
                mechanism.borrow_parameters(lender)
