"""Language models: causal ones, which generate, and masked ones.

B batch, N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput
from transformers.utils import can_return_tuple

from subquad.errors import InputError
from subquad.models import inputs
from subquad.models.cache import SubquadCache
from subquad.models.configuration import SubquadConfig
from subquad.models.transformer import SubquadModel, SubquadPreTrainedModel


class SubquadGenerationMixin(GenerationMixin):
    """`generate`, with a `SubquadCache`."""

    config: SubquadConfig

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], mode: GenerationMode, *args: Any
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise InputError(
                "a subquad model generates with a SubquadCache, which is as large as the states of its mechanisms; "
                f"got cache_implementation={generation_config.cache_implementation!r}. Leave it out."
            )
        if generation_config.assistant_early_exit is not None:
            raise InputError(
                "a subquad model does not support early-exit assisted decoding; got assistant_early_exit. "
                "Pass an assistant_model."
            )
        given = model_kwargs.get("past_key_values")
        if mode == GenerationMode.ASSISTED_GENERATION and given is not None and given.get_seq_length():
            raise InputError(
                "assisted decoding starts with an empty cache; got one with tokens. Leave past_key_values or the assistant out."
            )
        if generation_config.use_cache is False or given is not None:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, *args)
            return
        model_kwargs["past_key_values"] = SubquadCache(self.config)
        if generation_config.is_assistant:
            model_kwargs["past_key_values"].activate_past_recording()

    def _prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache = model_kwargs.get("past_key_values")
        past = 0 if cache is None else cache.get_seq_length()
        mask = model_kwargs.get("attention_mask")
        covered = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
        is_new_only = not self.config.is_encoder_decoder and covered == past + input_ids.shape[1]
        if past and input_ids.shape[1] <= past and not is_new_only:
            raise InputError(
                f"to continue from a cache, pass the whole text, including the tokens in the cache; the cache has {past} "
                f"tokens, and the text has {input_ids.shape[1]}."
            )
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        cache = kwargs.get("past_key_values")
        if self.config.is_encoder_decoder and next_sequence_length is None and cache is not None and cache.get_seq_length():
            next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
        _drop_positions(kwargs, input_ids.shape[1])
        return super().prepare_inputs_for_generation(input_ids, next_sequence_length=next_sequence_length, **kwargs)


def _drop_positions(kwargs: dict[str, Any], length: int) -> None:
    """A model that this one assists passes position_ids; they must be those that follow from the mask."""
    given = kwargs.pop("position_ids", None)
    if given is None:
        return
    mask = kwargs.get("attention_mask")
    implied = torch.arange(length)[None] if mask is None else (mask.long().cumsum(-1) - 1).clamp(min=0)
    given, implied = given.cpu()[:, -length:], implied.cpu()[:, -length:]
    real = torch.ones_like(implied, dtype=torch.bool) if mask is None else mask.bool().cpu()[:, -length:]
    if given.shape[1] != implied.shape[1] or bool(((given != implied) & real).any()):
        raise InputError("position_ids must be those that follow from the attention_mask; got others. Leave them out.")


def require_vocabulary(model: object, config: SubquadConfig) -> int:
    if config.vocab_size is None:
        raise InputError(f"{type(model).__name__} predicts tokens, so vocab_size must be a number; got None.")
    return config.vocab_size


class SubquadForCausalLM(SubquadPreTrainedModel, SubquadGenerationMixin):
    """A decoder that predicts each next token: `logits[:, t]` is about token t + 1."""

    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - Hugging Face's attribute

    def __init__(self, config: SubquadConfig) -> None:
        if isinstance(config, SubquadConfig) and config.architectures and not config.is_decoder:
            saved = ", ".join(config.architectures)
            raise InputError(f"this config was saved by the bidirectional {saved}. Set is_decoder=True to make it causal.")
        super().__init__(config, is_decoder=True)
        self.model = SubquadModel(self.config)
        self.lm_head = nn.Linear(config.hidden_size, require_vocabulary(self, config), bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: SubquadCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits (B, N, V), and with `labels` (B, N) the mean loss of predicting each label from the tokens before it.

        Args:
            labels: usually `input_ids` themselves; -100 for tokens to ignore.
            logits_to_keep: compute the logits of this many last tokens only; 0 for all.
            num_items_in_batch: divide the summed loss by this number instead of the number of labels, as `Trainer` does.
            attention_mask, inputs_embeds, past_key_values, use_cache: as in `SubquadModel`.
        """
        if isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise InputError(f"logits_to_keep must be an integer, 0 for all; got {logits_to_keep!r}.")
        if labels is not None and logits_to_keep:
            raise InputError("the loss needs all logits; got labels and logits_to_keep. Leave one out.")
        outputs = self.model(
            input_ids,
            attention_mask,
            inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            labels = inputs.targets(labels, logits, self.model.vocabulary)
            loss = ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )


class SubquadForMaskedLM(SubquadPreTrainedModel):
    """An encoder that predicts masked tokens."""

    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - Hugging Face's attribute

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        if config.is_decoder:
            raise InputError(
                "SubquadForMaskedLM is bidirectional; got is_decoder=True. Set it to False, or use SubquadForCausalLM."
            )
        self.model = SubquadModel(self.config)
        self.lm_head = nn.Linear(config.hidden_size, require_vocabulary(self, config), bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> MaskedLMOutput:
        """Logits (B, N, V), and with `labels` (B, N), -100 for tokens to ignore, the mean loss."""
        outputs = self.model(
            input_ids,
            attention_mask,
            inputs_embeds,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            labels = inputs.targets(labels, logits, self.model.vocabulary)
            loss = ForMaskedLMLoss(logits, labels, logits.shape[-1], num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
