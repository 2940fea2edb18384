"""Language models: causal, with generation, and masked.

B batch, N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput
from transformers.utils import can_return_tuple

from subquad.errors import InputError
from subquad.models import inputs
from subquad.models.cache import SubquadCache
from subquad.models.configuration import SubquadConfig
from subquad.models.transformer import SubquadModel, SubquadPreTrainedModel

IGNORED = -100  # the label that counts for nothing


class SubquadGenerationMixin(GenerationMixin):
    """`generate`, with a `SubquadCache`."""

    config: SubquadConfig

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise InputError(
                "a subquad model generates with a SubquadCache, whose size is that of its mechanisms' states; "
                f"got cache_implementation={generation_config.cache_implementation!r}. Leave it out."
            )
        if generation_config.use_cache is False or model_kwargs.get("past_key_values") is not None:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
            return
        model_kwargs["past_key_values"] = SubquadCache(self.config)
        if generation_config.is_assistant:
            model_kwargs["past_key_values"].activate_past_recording()


def require_vocabulary(model: object, config: SubquadConfig) -> int:
    if config.vocab_size is None:
        raise InputError(f"{type(model).__name__} predicts tokens, so it needs a vocab_size; got None.")
    return config.vocab_size


class SubquadForCausalLM(SubquadPreTrainedModel, SubquadGenerationMixin):
    """A decoder that predicts each next token: `logits[:, t]` is about token t + 1."""

    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - Hugging Face's attribute

    def __init__(self, config: SubquadConfig) -> None:
        config = config.changed(is_decoder=True)
        super().__init__(config)
        self.model = SubquadModel(config)
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
            labels: usually `input_ids` themselves; -100 counts for nothing.
            logits_to_keep: compute those of the last so many tokens only; 0 for all.
            num_items_in_batch: divide the summed loss by this instead of the labels here, as `Trainer` does.
            attention_mask, inputs_embeds, past_key_values, use_cache: as in `SubquadModel`.
        """
        if labels is not None:
            inputs.vocabulary("labels", labels, self.config.vocab_size, ignored=IGNORED)
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
            loss = ForCausalLMLoss(logits, labels, self.config.vocab_size, num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )


class SubquadForMaskedLM(SubquadPreTrainedModel):
    """An encoder that predicts the tokens behind masks."""

    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - Hugging Face's attribute

    def __init__(self, config: SubquadConfig) -> None:
        config = config.changed(is_decoder=False)
        super().__init__(config)
        self.model = SubquadModel(config)
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
        """Logits (B, N, V), and with `labels` (B, N), -100 where nothing is to be predicted, the mean loss."""
        if labels is not None:
            inputs.vocabulary("labels", labels, self.config.vocab_size, ignored=IGNORED)
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
            loss = ForMaskedLMLoss(logits, labels, self.config.vocab_size, num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
