"""`SubquadForConditionalGeneration`: an encoder reads one sequence; a decoder attends to it and generates another.

B batch, M source tokens, N target tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import can_return_tuple

from subquad.errors import InputError
from subquad.models import inputs
from subquad.models.cache import SubquadCache
from subquad.models.configuration import SubquadConfig
from subquad.models.language import SubquadGenerationMixin, require_vocabulary
from subquad.models.transformer import SubquadModel, SubquadPreTrainedModel


class SubquadForConditionalGeneration(SubquadPreTrainedModel, SubquadGenerationMixin):
    """Encoder and decoder over one vocabulary. With `tie_word_embeddings`, both and the output layer share one table."""

    accepts_loss_kwargs = True
    _tied_weights_keys = {  # noqa: RUF012 - Hugging Face's attribute
        "encoder.embed_tokens.weight": "decoder.embed_tokens.weight",
        "lm_head.weight": "decoder.embed_tokens.weight",
    }

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config, is_encoder_decoder=True)
        self.encoder = SubquadModel(self.config.encoder_part())
        self.decoder = SubquadModel(self.config.decoder_part())
        self.lm_head = nn.Linear(config.hidden_size, require_vocabulary(self, config), bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.decoder.embed_tokens = value
        if self.config.tie_word_embeddings:
            self.encoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: SubquadCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Seq2SeqLMOutput:
        """Logits (B, N, V) of the target given the source, and with `labels` (B, N) the mean loss.

        Args:
            input_ids, attention_mask: the source, (B, M); pass `encoder_outputs` instead if it has been encoded before.
            decoder_input_ids: the target so far; by default `labels` shifted right by one, after `decoder_start_token_id`.
            labels: the target; -100 for tokens to ignore.
            past_key_values: a `SubquadCache` of the decoder's earlier tokens.
        """
        shown = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, **shown, return_dict=True)
        elif input_ids is not None or inputs_embeds is not None:
            raise InputError(
                "the source must be given once; got encoder_outputs, and ids or embeddings as well. Pass one of them."
            )
        elif not hasattr(encoder_outputs, "last_hidden_state"):
            if not isinstance(encoder_outputs, (tuple, list)):
                raise InputError(f"encoder_outputs must be the output of the encoder; got {type(encoder_outputs).__name__}.")
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            inputs.vocabulary("labels", labels, self.decoder.vocabulary, ignored=inputs.IGNORED)
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        inputs.tokens("decoder_input_ids", decoder_input_ids, decoder_inputs_embeds, self.decoder.vocabulary)
        outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            decoder_inputs_embeds,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **shown,
            return_dict=True,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            labels = inputs.targets(labels, logits, self.decoder.vocabulary)
            loss = ForMaskedLMLoss(logits, labels, logits.shape[-1], num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.hidden_states,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.get("hidden_states"),
        )

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """`labels` shifted right by one, after the start token; ignored labels become padding."""
        config = self.config
        start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
        if start is None:
            raise InputError(
                "labels are shifted right after a start token; got none. Set decoder_start_token_id or bos_token_id."
            )
        pad = start if config.pad_token_id is None else config.pad_token_id
        moved = torch.cat([labels.new_full((labels.shape[0], 1), start), labels[:, :-1]], dim=1)
        return moved.masked_fill(moved == inputs.IGNORED, pad)
