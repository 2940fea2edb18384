"""What the attention of a model reads and gives, site by site, while the model runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.attention import MechanismModule
from subquad.conversion.record import written
from subquad.conversion.swap import convert, every_mechanism, revert

_DECODED = ("decoder_input_ids", "decoder_inputs_embeds")
_AGAIN = ("is_causal", "key_padding_mask", "attn_mask")

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Seen:
    """One call of a mechanism: query (B, H, N, D), key (B, K, M, D), value (B, K, M, D), output (B, H, N, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    output: Tensor

    def by(self, mechanism: MechanismModule, value: Tensor | None = None) -> Tensor:
        """What `mechanism` gives for the same input, or for other values."""
        return mechanism(self.query, self.key, self.value if value is None else value, **self.options)

    @property
    def real(self) -> Tensor | None:
        """(B, N): queries that are no pads, where keys and queries are the same tokens."""
        pads: Tensor | None = self.options["key_padding_mask"]
        return pads if pads is not None and pads.shape[1] == self.query.shape[2] else None


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[dict[str, Seen]]:
    """A record of each site's last call, by the site's name, of a converted model that runs meanwhile."""
    seen: dict[str, Seen] = {}

    def take(name: str) -> Any:
        def hook(_: MechanismModule, args: tuple[Tensor, ...], given: dict[str, Any], output: Any) -> None:
            options = {option: given[option] for option in _AGAIN}
            query, key, value = (x.detach() for x in args)
            seen[name] = Seen(query, key, value, options, output.detach())

        return hook

    handles = [
        mechanism.register_forward_hook(take(name), with_kwargs=True) for name, mechanism in every_mechanism(model).items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watchable(original: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """`original` with its own attention behind mechanisms, in evaluation, as it was afterwards; a converted one as it is."""
    if written(original.config) is not None:
        yield original
        return
    was_training = original.training
    convert(original.eval(), "softmax", beyond_context=True)
    try:
        yield original
    finally:
        revert(original).train(was_training)


@torch.no_grad()
def run(model: PreTrainedModel, batch: Batch) -> tuple[dict[str, Seen], Tensor]:
    """What each site of a converted model sees of one batch, and the model's last hidden states."""
    with watched(model) as seen:
        states = last_states(model, batch)
    return seen, states


def last_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """(B, N, dim): what a model makes of a batch before its head."""
    part = model.base_model
    has_head = part.get_output_embeddings() is not None  # T5 with a head has no other part without
    found = part(**model_inputs(part, batch), **({"output_hidden_states": True} if has_head else {}))
    if (states := getattr(found, "last_hidden_state", None)) is None:
        states = (getattr(found, "decoder_hidden_states", None) or found.hidden_states)[-1]
    return states


def real_tokens(batch: Batch, states: Tensor) -> Tensor:
    """(B, N) bool: which of the states are of no pads, where the batch says so of these tokens."""
    mask = batch.get("attention_mask")
    if mask is None or mask.shape != states.shape[:2]:
        return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    return mask.bool().to(states.device)


def is_causal_lm(model: PreTrainedModel) -> bool:
    """Whether it predicts each token from those before it."""
    return bool(model.can_generate() and not model.config.is_encoder_decoder)


def model_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """What of a batch a model reads, where the model is; without a cache. A decoder that is given nothing reads the same."""
    read = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
    if model.config.is_encoder_decoder and "input_ids" in read and not any(name in read for name in _DECODED):
        read["decoder_input_ids"] = _shifted(model, read["input_ids"])
    return {**read, "use_cache": False} if hasattr(model.config, "use_cache") else read


def _shifted(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(B, N): behind the token that a decoder begins with, all but the last."""
    config: Any = model.config
    first = next((n for n in (config.decoder_start_token_id, config.bos_token_id, config.pad_token_id) if n is not None), 0)
    return torch.cat([ids.new_full((ids.shape[0], 1), first), ids[:, :-1]], dim=1)
