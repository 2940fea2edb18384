"""What the attention sites of a model read and return while the model runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.attention import MechanismModule
from subquad.conversion.swap import convert, revert
from subquad.models.converted import record
from subquad.models.converted.installation import all_mechanisms

_DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")
_REPLAYED = ("is_causal", "key_padding_mask", "attn_mask")  # arguments of a call that a replay has, too

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class AttentionCall:
    """One call of a mechanism: query (B, H, N, D), key (B, K, M, D), value (B, K, M, D), output (B, H, N, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    output: Tensor

    def replay(self, mechanism: MechanismModule, value: Tensor | None = None) -> Tensor:
        """The output of another mechanism for the same input, or for other values."""
        return mechanism(self.query, self.key, self.value if value is None else value, **self.options)

    @property
    def real_queries(self) -> Tensor | None:
        """(B, N): which queries are not pads, if that is known: where queries and keys are the same tokens."""
        mask: Tensor | None = self.options["key_padding_mask"]
        return mask if mask is not None and mask.shape[1] == self.query.shape[2] else None


@contextmanager
def recorded_calls(model: PreTrainedModel) -> Iterator[dict[str, AttentionCall]]:
    """The last call of each site's mechanism, by the name of the site, while a converted model runs."""
    calls: dict[str, AttentionCall] = {}

    def recorder(name: str) -> Any:
        def hook(_: MechanismModule, args: tuple[Tensor, ...], given: dict[str, Any], output: Any) -> None:
            options = {option: given[option] for option in _REPLAYED}
            query, key, value = (x.detach() for x in args)
            calls[name] = AttentionCall(query, key, value, options, output.detach())

        return hook

    handles = [
        mechanism.register_forward_hook(recorder(name), with_kwargs=True) for name, mechanism in all_mechanisms(model).items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recordable(original: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """`original` converted to softmax and in evaluation mode, so that its calls can be recorded; reverted at the end.

    A model that is converted already is left alone.
    """
    if record.read(original.config) is not None:
        yield original
        return
    was_training = original.training
    convert(original.eval(), "softmax", beyond_context=True)
    try:
        yield original
    finally:
        revert(original).train(was_training)


@torch.no_grad()
def run_recorded(model: PreTrainedModel, batch: Batch) -> tuple[dict[str, AttentionCall], Tensor]:
    """The calls of each site of a converted model for one batch, and the model's last hidden states."""
    with recorded_calls(model) as calls:
        states = last_hidden_states(model, batch)
    return calls, states


def last_hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """(B, N, dim): the output of a model before its head."""
    base = model.base_model
    has_head = base.get_output_embeddings() is not None  # T5 with a head has no model without the head inside
    found = base(**model_inputs(base, batch), **({"output_hidden_states": True} if has_head else {}))
    if (states := getattr(found, "last_hidden_state", None)) is None:
        states = (getattr(found, "decoder_hidden_states", None) or found.hidden_states)[-1]
    return states


def real_tokens(batch: Batch, states: Tensor) -> Tensor:
    """(B, N) bool: which states belong to real tokens; all, if the batch has no mask for them."""
    mask = batch.get("attention_mask")
    if mask is None or mask.shape != states.shape[:2]:
        return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    return mask.bool().to(states.device)


def is_causal_lm(model: PreTrainedModel) -> bool:
    """Whether it predicts each token from those before it."""
    return bool(model.can_generate() and not model.config.is_encoder_decoder)


def model_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """The part of a batch that the model reads, on its device, without a cache.

    A decoder that gets no input of its own reads that of the encoder.
    """
    inputs = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
    if model.config.is_encoder_decoder and "input_ids" in inputs and not any(name in inputs for name in _DECODER_INPUTS):
        inputs["decoder_input_ids"] = _shifted(model, inputs["input_ids"])
    return {**inputs, "use_cache": False} if hasattr(model.config, "use_cache") else inputs


def _shifted(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(B, N): shifted right by one, after the start token of the decoder."""
    config: Any = model.config
    first = next((n for n in (config.decoder_start_token_id, config.bos_token_id, config.pad_token_id) if n is not None), 0)
    return torch.cat([ids.new_full((ids.shape[0], 1), first), ids[:, :-1]], dim=1)
