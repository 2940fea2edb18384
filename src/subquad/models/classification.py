"""Classification of sequences, tokens and images.

B batch, N tokens, L labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput, SequenceClassifierOutput, TokenClassifierOutput
from transformers.utils import can_return_tuple

from subquad.errors import InputError
from subquad.models import inputs
from subquad.models.configuration import SubquadConfig
from subquad.models.transformer import SubquadModel, SubquadPreTrainedModel


def pooled(hidden: Tensor, attention_mask: Tensor | None, is_causal: bool) -> Tensor:
    """(B, N, dim) -> (B, dim): the mean of the real tokens of a row; if causal, the last one, which has seen all others."""
    if not hidden.shape[1]:
        raise InputError("a sequence to classify must have at least one token; got none.")
    if attention_mask is None:
        return hidden[:, -1] if is_causal else hidden.mean(1)
    real = attention_mask.to(hidden.device).bool()
    if is_causal:
        places = torch.arange(real.shape[1], device=real.device)
        last = torch.where(real, places, 0).argmax(1)
        return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]
    count = real.sum(1, keepdim=True).clamp(min=1)
    return hidden.masked_fill(~real.unsqueeze(-1), 0).sum(1) / count


class _Classifier(SubquadPreTrainedModel):
    """Blocks, and a linear map to the logits of the labels."""

    def __init__(self, config: SubquadConfig, **fields: Any) -> None:
        super().__init__(config, **fields)
        self.num_labels = config.num_labels
        if not self.num_labels or self.num_labels < 1:
            raise InputError(f"num_labels must be at least 1 for {type(self).__name__}; got {self.num_labels!r}.")
        self.model = SubquadModel(self.config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def _loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        return self.loss_function(inputs.classes(labels, logits, self.config.problem_type), logits, self.config)


class SubquadForSequenceClassification(_Classifier):
    """One label, several labels or a number for a sequence, from the mean of its tokens; in a decoder, from the last token."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
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
    ) -> SequenceClassifierOutput:
        """Logits (B, L), and with `labels` the loss: (B,) classes or numbers, (B, L) for several labels at once."""
        outputs = self.model(
            input_ids,
            attention_mask,
            inputs_embeds,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        whole = pooled(outputs.last_hidden_state, attention_mask, self.config.is_decoder)
        logits = self.classifier(self.dropout(whole))
        loss = None if labels is None else self._loss(labels, logits)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class SubquadForTokenClassification(_Classifier):
    """A label for each token."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
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
    ) -> TokenClassifierOutput:
        """Logits (B, N, L), and with `labels` (B, N), -100 for tokens to ignore, the mean loss."""
        outputs = self.model(
            input_ids,
            attention_mask,
            inputs_embeds,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, inputs.classes(labels, logits, "single_label_classification"), self.config)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class SubquadForImageClassification(_Classifier):
    """A label for an image, read as a sequence of patches from the top left; with `patch_size=1` every pixel is a token."""

    main_input_name = "pixel_values"

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config, vocab_size=None)
        height, width = config.image_sides
        patch = config.patch_size
        if any(isinstance(side, bool) or not isinstance(side, int) or side < 1 or side % patch for side in (height, width)):
            raise InputError(
                f"image_size must be one or two whole numbers that patch_size={patch} divides; got {config.image_size!r}."
            )
        self.patches = nn.Linear(config.num_channels * patch**2, config.hidden_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> ImageClassifierOutput:
        """Logits (B, L) of images (B, channels, height, width), and with `labels` the loss."""
        expected = (self.config.num_channels, *self.config.image_sides)
        if not isinstance(pixel_values, Tensor) or pixel_values.dim() != 4 or tuple(pixel_values.shape[1:]) != expected:
            came = tuple(pixel_values.shape) if isinstance(pixel_values, Tensor) else type(pixel_values).__name__
            sizes = ", ".join(map(str, expected))
            raise InputError(f"pixel_values must be (batch, channels, height, width) = (batch, {sizes}); got {came}.")
        side = self.config.patch_size
        patches = pixel_values.unfold(2, side, side).unfold(3, side, side)  # (B, C, rows, columns, side, side)
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # (B, N, C side^2)
        outputs = self.model(
            inputs_embeds=self.patches(patches),
            use_cache=False,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        whole = pooled(outputs.last_hidden_state, None, self.config.is_decoder)
        logits = self.classifier(self.dropout(whole))
        loss = None if labels is None else self._loss(labels, logits)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
