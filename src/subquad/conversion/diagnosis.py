"""`diagnose`: the damage done by a conversion, per head and for the whole model.

Each converted site's mechanism gets the queries, keys and values of the same site in the original, so that each head is
measured on its own: the relative error of its output, and the divergence of its attention weights,

    |o' - o| / |o|      and      KL(A_i || A'_i) = sum_j A_ij log(A_ij / A'_ij),  the mean over queries i.

The weights are the output for the identity as values. For the whole model: the cosine between the last hidden states of both
models and, for language models, the loss of each.

B batch, H query heads, K key-value heads, N tokens, D channels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from subquad.attention import MechanismModule
from subquad.conversion.activations import (
    AttentionCall,
    Batch,
    is_causal_lm,
    last_hidden_states,
    real_tokens,
    recordable,
    run_recorded,
)
from subquad.errors import InputError
from subquad.models.converted import record
from subquad.models.converted.installation import all_mechanisms, mechanisms
from subquad.ops.precision import upcast
from subquad.runs.progress import OnProgress, Progress
from subquad.runs.results_file import Count
from subquad.runs.typed_json import Figure

MIN_TOKENS = 64  # of a calibration set
_WEIGHT_LENGTH = 256  # tokens of a sequence whose attention weights are compared
_TINY = 1e-9  # smaller weights are raised to it: some mechanisms have weights of 0, or negative ones


@dataclass(frozen=True)
class Head:
    """The damage to one head: the relative error of its output, and the divergence of its weights, None if it has none."""

    site: str
    layer: Count
    head: Count
    error: Figure
    kl: Figure | None


@dataclass(frozen=True)
class Diagnosis:
    """What a conversion has lost.

    Args:
        heads: the heads of every converted site.
        cosine: between the last hidden states of both models, the mean over tokens.
        loss_before, loss_after: nats per token of a language model; None for other models.
        tokens: the number of tokens that it was measured on.
    """

    heads: tuple[Head, ...]
    cosine: Figure
    loss_before: Figure | None
    loss_after: Figure | None
    tokens: Count

    @property
    def perplexity_before(self) -> float | None:
        return None if self.loss_before is None else math.exp(min(self.loss_before, 700))

    @property
    def perplexity_after(self) -> float | None:
        return None if self.loss_after is None else math.exp(min(self.loss_after, 700))

    def ranked(self) -> list[Head]:
        """The heads, the largest error first."""
        return sorted(self.heads, key=lambda head: -head.error)

    def layers(self) -> dict[int, float]:
        """The mean error of the heads of each layer."""
        found: dict[int, list[float]] = {}
        for head in self.heads:
            found.setdefault(head.layer, []).append(head.error)
        return {layer: sum(errors) / len(errors) for layer, errors in sorted(found.items())}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    on_progress: OnProgress = lambda progress: None,
) -> Diagnosis:
    """Measure what `converted` has lost compared to `original`, on real inputs.

    Args:
        original: the model before conversion; it is not changed.
        converted: the converted copy of it.
        batches: inputs of both, such as {"input_ids": …, "attention_mask": …}. The loss of language models is measured, too.
        on_progress: called with a `Progress` after each batch.
    """
    batches = list(batches)
    require_tokens(batches)
    require_pair(original, converted)
    heads = _HeadErrors(converted)
    whole = ModelComparison()
    started = time.monotonic()
    was_training = converted.training
    converted.eval()
    try:
        with recordable(original) as teacher, torch.no_grad():
            for done, batch in enumerate(batches, 1):
                calls, before = run_recorded(teacher, batch)
                heads.add(calls)
                whole.add(teacher, before, converted, batch)
                left = (time.monotonic() - started) * (len(batches) - done) / done
                on_progress(Progress(f"{done} of {len(batches)}", done / len(batches), left))
    finally:
        converted.train(was_training)
    return whole.diagnosis(heads.heads())


def require_tokens(batches: Sequence[Batch]) -> None:
    """Refuse batches with too few tokens to measure by, or to learn from."""
    for batch in batches:
        if not isinstance(batch, Mapping) or not batch or not all(isinstance(value, Tensor) for value in batch.values()):
            came = "an empty one" if isinstance(batch, Mapping) and not batch else f"a batch of type {type(batch).__name__}"
            raise InputError(f'batches must be inputs of the model, such as [{{"input_ids": …}}, …]; got {came}.')
    found = sum(tokens_of(batch) for batch in batches)
    if found < MIN_TOKENS:
        raise InputError(
            f"a calibration set must have at least {MIN_TOKENS} tokens; got {found}, in {len(batches)} batches. Pass more text."
        )


def require_pair(original: PreTrainedModel, converted: PreTrainedModel) -> None:
    """Refuse models of which one is not a conversion of the other."""
    conversion = record.require(converted)
    if original is converted or record.read(original.config) is not None:
        raise InputError(
            "the original must be a model that is not converted; got a converted one. Convert a copy: "
            "subquad.convert(model, method, copy=True)."
        )
    with recordable(original) as teacher:
        if set(all_mechanisms(teacher)) != set(conversion.sites):
            raise InputError(
                "the original and the converted model must have the same architecture; got different ones. Pass the model that "
                "was converted."
            )


def tokens_of(batch: Batch) -> int:
    """The number of real tokens; an image counts as a fixed number."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    if "input_ids" in batch:
        return batch["input_ids"].numel()
    return next(iter(batch.values())).shape[0] * MIN_TOKENS


def head_errors(call: AttentionCall, output: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of squares (H,) over real queries: of the error of `output`, and of the output that was recorded."""
    output, expected = upcast(output), upcast(call.output)
    squares = [(output - expected).square(), expected.square()]
    if (real := call.real_queries) is not None:
        squares = [x * real[:, None, :, None] for x in squares]
    error, size = (x.sum((0, 2, 3)) for x in squares)
    return error, size


class _HeadErrors:
    """Sums over batches, for each head of each converted site."""

    def __init__(self, converted: PreTrainedModel) -> None:
        self.mechanisms = mechanisms(converted)
        self.error: dict[str, Tensor] = {}
        self.size: dict[str, Tensor] = {}
        self.divergence: dict[str, list[Tensor]] = {name: [] for name in self.mechanisms}

    def add(self, calls: dict[str, AttentionCall]) -> None:
        for name, mechanism in self.mechanisms.items():
            error, size = head_errors(calls[name], calls[name].replay(mechanism))
            self.error[name] = self.error.get(name, 0) + error.double()
            self.size[name] = self.size.get(name, 0) + size.double()
            if not mechanism.method.fixes_value_dim:
                self.divergence[name].append(_divergence(calls[name], mechanism))

    def heads(self) -> tuple[Head, ...]:
        found = []
        for name in self.mechanisms:
            errors = (self.error[name] / self.size[name].clamp(min=_TINY)).sqrt().tolist()
            parts = self.divergence[name]
            divergences = torch.stack(parts).mean(0).tolist() if parts else [None] * len(errors)
            layer = int(next(part for part in name.split(".") if part.isdigit()))
            found += [Head(name, layer, i, error, kl) for i, (error, kl) in enumerate(zip(errors, divergences, strict=True))]
        return tuple(found)


def _divergence(call: AttentionCall, mechanism: MechanismModule) -> Tensor:
    """(H,): the mean over the real queries of the first sequence."""
    one = _first_sequence(call)
    keys = one.key.shape[2]
    identity = torch.eye(keys, dtype=one.key.dtype, device=one.key.device).expand(1, one.key.shape[1], keys, keys)
    exact = MechanismModule("softmax", heads=one.query.shape[1], kv_heads=one.key.shape[1], head_dim=one.key.shape[3])
    expected, found = (one.replay(by, identity).clamp(min=_TINY) for by in (exact, mechanism))  # (1, H, N, M)
    expected, found = (x / x.sum(-1, keepdim=True) for x in (expected, found))
    rows = (expected * (expected.log() - found.log())).sum(-1)[0]  # (H, N)
    real = one.real_queries
    return rows.mean(-1) if real is None else rows[:, real[0]].mean(-1)


def _first_sequence(call: AttentionCall) -> AttentionCall:
    """The first sequence alone, cut so that its weights fit in memory, unless cutting would change their meaning."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    length = _WEIGHT_LENGTH if queries == keys and call.options["attn_mask"] is None else max(queries, keys)

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:1, ..., :length, :] if x.dim() == 4 else x[:1, :length]

    options = {name: cut(value) if isinstance(value, Tensor) else value for name, value in call.options.items()}
    query, key, value, output = (cut(x) for x in (call.query, call.key, call.value, call.output))
    return AttentionCall(query, key, value, options, output)  # type: ignore[arg-type]


class ModelComparison:
    """Sums over batches, for the outputs of two whole models."""

    def __init__(self) -> None:
        self.cosine = self.before = self.after = 0.0
        self.tokens = self.predicted = 0

    def add(self, original: PreTrainedModel, before: Tensor, converted: PreTrainedModel, batch: Batch) -> None:
        """One batch; `before` are the last hidden states of the original."""
        after = last_hidden_states(converted, batch)
        real = real_tokens(batch, before)
        self.cosine += float(F.cosine_similarity(before.double(), after.double(), dim=-1)[real].sum())
        self.tokens += int(real.sum())
        if is_causal_lm(original):
            ids = batch["input_ids"].to(before.device)
            losses = [_loss(model, states, ids, real) for model, states in ((original, before), (converted, after))]
            self.before += losses[0][0]
            self.after += losses[1][0]
            self.predicted += losses[0][1]

    @property
    def loss(self) -> float:
        """Of the converted model: nats per token of a language model, or 1 minus the cosine of the last hidden states."""
        return self.after / self.predicted if self.predicted else 1 - self.cosine / self.tokens

    def diagnosis(self, heads: tuple[Head, ...]) -> Diagnosis:
        before, after = (x / self.predicted if self.predicted else None for x in (self.before, self.after))
        return Diagnosis(heads, self.cosine / self.tokens, before, after, self.tokens)


def _loss(model: Any, state: Tensor, ids: Tensor, real: Tensor) -> tuple[float, int]:
    """The sum of the losses of predicting each real token from those before it, and the number of these tokens."""
    logits = model.get_output_embeddings()(state[:, :-1]).float()
    wanted = ids[:, 1:].masked_fill(~(real[:, 1:] & real[:, :-1]), -100)
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    return float(losses), int((wanted != -100).sum())
