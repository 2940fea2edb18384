"""`diagnose`: what a conversion has broken, head by head and as a whole.

Every site of the original hands its queries, keys and values to the converted site's mechanism too, so that each is judged by
itself, on what it would have read: the relative error of its output, and the divergence of its attention weights,

    |o' - o| / |o|      and      KL(A_i || A'_i) = sum_j A_ij log(A_ij / A'_ij),  the mean over queries i,

both by head. The weights are read off with the identity as values. Then both models run as they are: the cosine of their last
hidden states, and, for language models, the loss of each.

B batch, H query heads, K key-value heads, N tokens, D channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from subquad.attention import MechanismModule
from subquad.conversion import record as records
from subquad.conversion.activations import Batch, Seen, is_causal_lm, last_states, real_tokens, run, watchable
from subquad.conversion.swap import every_mechanism, mechanisms
from subquad.errors import InputError
from subquad.ops.precision import upcast

LEAST = 64  # tokens of a calibration set
_WEIGHED = 256  # tokens of a sequence whose weights are compared
_TINY = 1e-9  # a weight below it counts as it: some mechanisms have none, or negative ones


@dataclass(frozen=True)
class Head:
    """The damage to one head: the relative error of its output, and the divergence of its weights, None where it has none."""

    site: str
    layer: int
    head: int
    error: float
    kl: float | None


@dataclass(frozen=True)
class Diagnosis:
    """What a conversion has broken.

    Args:
        heads: of every converted site.
        cosine: of the last hidden states of both models, the mean over tokens.
        loss_before, loss_after: in nats a token, of a language model; None for others.
        tokens: that it was measured on.
    """

    heads: tuple[Head, ...]
    cosine: float
    loss_before: float | None
    loss_after: float | None
    tokens: int

    @property
    def perplexity_before(self) -> float | None:
        return None if self.loss_before is None else math.exp(self.loss_before)

    @property
    def perplexity_after(self) -> float | None:
        return None if self.loss_after is None else math.exp(min(self.loss_after, 700))

    def ranked(self) -> list[Head]:
        """The heads with the most damage first."""
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
    tell: Callable[[int], object] = lambda done: None,
) -> Diagnosis:
    """What `converted` has lost against `original`, on real inputs.

    Args:
        original: the model before conversion; it is left as it is.
        converted: what `convert` made of it, or of a copy of it.
        batches: inputs of both, such as {"input_ids": …, "attention_mask": …}; of language models the loss is measured too.
        tell: called with the number of batches that are done.
    """
    batches = list(batches)
    require_tokens(batches)
    require_pair(original, converted)
    damage = _Damage(converted)
    whole = Whole()
    was_training = converted.training
    converted.eval()
    try:
        with watchable(original) as teacher, torch.no_grad():
            for done, batch in enumerate(batches, 1):
                seen, before = run(teacher, batch)
                damage.add(seen)
                whole.add(teacher, before, converted, batch)
                tell(done)
    finally:
        converted.train(was_training)
    return whole.diagnosis(damage.heads())


def require_tokens(batches: Sequence[Batch], least: int = LEAST) -> None:
    """That there is enough to judge by, or to learn from."""
    for batch in batches:
        if not isinstance(batch, Mapping) or not batch or not all(isinstance(value, Tensor) for value in batch.values()):
            came = "an empty one" if isinstance(batch, Mapping) and not batch else f"one that is {type(batch).__name__}"
            raise InputError(f'batches are inputs of the model, such as [{{"input_ids": …}}, …]; got {came}.')
    found = sum(tokens_of(batch) for batch in batches)
    if found < least:
        raise InputError(
            f"a calibration set has at least {least} tokens; got {found}, in {len(batches)} batches. Pass more text."
        )


def require_pair(original: PreTrainedModel, converted: PreTrainedModel) -> None:
    """That one is a conversion of the other, and not the other itself."""
    conversion = records.of(converted)
    if original is converted or records.written(original.config) is not None:
        raise InputError(
            "the original is a model that is not converted; got a converted one. Convert a copy: "
            "subquad.convert(model, method, copy=True)."
        )
    with watchable(original) as teacher:
        if set(every_mechanism(teacher)) != set(conversion.sites):
            raise InputError("the original and the converted model are not the same architecture. Pass what was converted.")


def tokens_of(batch: Batch) -> int:
    """Real tokens, or patches' worth of images."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    if "input_ids" in batch:
        return batch["input_ids"].numel()
    return next(iter(batch.values())).shape[0] * LEAST


def head_errors(seen: Seen, output: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of squares (H,) over real queries: of the difference to what was seen, and of what was seen."""
    output, expected = upcast(output), upcast(seen.output)
    squares = [(output - expected).square(), expected.square()]
    if seen.real is not None:
        squares = [x * seen.real[:, None, :, None] for x in squares]
    missed, had = (x.sum((0, 2, 3)) for x in squares)
    return missed, had


class _Damage:
    """Sums over batches, for each head of each converted site."""

    def __init__(self, converted: PreTrainedModel) -> None:
        self.mechanisms = mechanisms(converted)
        self.missed: dict[str, Tensor] = {}
        self.had: dict[str, Tensor] = {}
        self.divergence: dict[str, list[Tensor]] = {name: [] for name in self.mechanisms}

    def add(self, seen: dict[str, Seen]) -> None:
        for name, mechanism in self.mechanisms.items():
            missed, had = head_errors(seen[name], seen[name].by(mechanism))
            self.missed[name] = self.missed.get(name, 0) + missed.double()
            self.had[name] = self.had.get(name, 0) + had.double()
            if not mechanism.method.fixes_value_dim:
                self.divergence[name].append(_divergence(seen[name], mechanism))

    def heads(self) -> tuple[Head, ...]:
        found = []
        for name in self.mechanisms:
            errors = (self.missed[name] / self.had[name].clamp(min=_TINY)).sqrt().tolist()
            parts = self.divergence[name]
            divergences = torch.stack(parts).mean(0).tolist() if parts else [None] * len(errors)
            layer = int(next(part for part in name.split(".") if part.isdigit()))
            found += [Head(name, layer, i, error, kl) for i, (error, kl) in enumerate(zip(errors, divergences, strict=True))]
        return tuple(found)


def _divergence(seen: Seen, mechanism: MechanismModule) -> Tensor:
    """(H,): the mean over the first sequence's real queries."""
    one = _first(seen)
    keys = one.key.shape[2]
    identity = torch.eye(keys, dtype=one.key.dtype, device=one.key.device).expand(1, one.key.shape[1], keys, keys)
    exact = MechanismModule("softmax", heads=one.query.shape[1], kv_heads=one.key.shape[1], head_dim=one.key.shape[3])
    expected, found = (one.by(by, identity).clamp(min=_TINY) for by in (exact, mechanism))  # (1, H, N, M)
    expected, found = (x / x.sum(-1, keepdim=True) for x in (expected, found))
    rows = (expected * (expected.log() - found.log())).sum(-1)[0]  # (H, N)
    return rows.mean(-1) if one.real is None else rows[:, one.real[0]].mean(-1)


def _first(seen: Seen) -> Seen:
    """The first sequence alone, cut to a length whose weights fit in memory; as it is where that would change its meaning."""
    queries, keys = seen.query.shape[2], seen.key.shape[2]
    length = _WEIGHED if queries == keys and seen.options["attn_mask"] is None else max(queries, keys)

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:1, ..., :length, :] if x.dim() == 4 else x[:1, :length]

    options = {name: cut(value) if isinstance(value, Tensor) else value for name, value in seen.options.items()}
    tensors = (cut(x) for x in (seen.query, seen.key, seen.value, seen.output))
    query, key, value, output = tensors
    return Seen(query, key, value, options, output)  # type: ignore[arg-type]


class Whole:
    """Sums over batches, for the models as they are."""

    def __init__(self) -> None:
        self.cosine = self.before = self.after = 0.0
        self.tokens = self.predicted = 0

    def add(self, original: PreTrainedModel, before: Tensor, converted: PreTrainedModel, batch: Batch) -> None:
        """One batch; `before` are the original's last hidden states."""
        after = last_states(converted, batch)
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
        """Of the converted model: nats a token for a language model, otherwise 1 minus the cosine of its last hidden states."""
        return self.after / self.predicted if self.predicted else 1 - self.cosine / self.tokens

    def diagnosis(self, heads: tuple[Head, ...]) -> Diagnosis:
        before, after = (x / self.predicted if self.predicted else None for x in (self.before, self.after))
        return Diagnosis(heads, self.cosine / self.tokens, before, after, self.tokens)


def _loss(model: Any, state: Tensor, ids: Tensor, real: Tensor) -> tuple[float, int]:
    """The sum of the losses of predicting each real token from those before it, and how many there are."""
    logits = model.get_output_embeddings()(state[:, :-1]).float()
    wanted = ids[:, 1:].masked_fill(~(real[:, 1:] & real[:, :-1]), -100)
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    return float(losses), int((wanted != -100).sum())
