"""Keep-k search: which k layers should stay softmax.

Greedy: of all converted layers, the one that lowers the loss most becomes softmax again; then, beside it, the next, k times.
That tries k (2 L - k + 1) / 2 models of L layers. Nothing is learnt in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.attention import MechanismModule
from subquad.conversion import record as records
from subquad.conversion.activations import Batch, run, watchable
from subquad.conversion.diagnosis import Whole, require_pair, require_tokens
from subquad.conversion.interface import NAME
from subquad.conversion.sites import Site, sites
from subquad.errors import InputError
from subquad.mechanisms import Softmax

Tried = tuple[int, int, float]  # how many layers were kept so far, one more, and the loss with it


@dataclass(frozen=True)
class Kept:
    """What a search has found.

    Args:
        layers: that stay softmax, the most useful first.
        losses: before, and after each of them.
        tried: every model.
    """

    layers: tuple[int, ...]
    losses: tuple[float, ...]
    tried: tuple[Tried, ...]


def keep_softmax(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Sequence[Batch],
    count: int,
    *,
    known: Sequence[Tried] = (),
    tell: Callable[[Sequence[Tried], int], object] = lambda tried, of: None,
) -> Kept:
    """Put softmax back into the `count` layers of `converted` where that helps most; what the others have learnt stays.

    Args:
        known: what the same search has tried before it was stopped, and need not try again.
        tell: called with what has been tried, and how many that will be.
    """
    require_tokens(batches)
    require_pair(original, converted)
    by_layer = converted_layers(converted)
    require_count(count, len(by_layer))
    before_that = {(kept, layer): loss for kept, layer, loss in known}
    total = count * (2 * len(by_layer) - count + 1) // 2
    kept: list[int] = []
    tried: list[Tried] = []
    was_training = converted.training
    converted.eval()
    with watchable(original) as teacher:
        before = [run(teacher, batch)[1] for batch in batches]

        def loss() -> float:
            return _loss(teacher, before, converted, batches)

        losses = [loss()]
        for _ in range(count):
            found = {}
            for layer in sorted(set(by_layer) - set(kept)):
                if (len(kept), layer) in before_that:
                    found[layer] = before_that[len(kept), layer]
                else:
                    own = [_exchange(site) for site in by_layer[layer]]
                    try:
                        found[layer] = loss()
                    finally:
                        for site, mechanism in zip(by_layer[layer], own, strict=True):
                            site.module.add_module(NAME, mechanism)
                tried.append((len(kept), layer, found[layer]))
                tell(tried, total)
            best = min(found, key=lambda layer: found[layer])
            for site in by_layer[best]:
                _exchange(site)
            kept.append(best)
            losses.append(found[best])
    _write(converted)
    converted.train(was_training)
    return Kept(tuple(kept), tuple(losses), tuple(tried))


def converted_layers(converted: PreTrainedModel) -> dict[int, list[Site]]:
    """The sites that are not softmax, by layer."""
    by_layer: dict[int, list[Site]] = {}
    for site in sites(converted):
        if not getattr(site.module, NAME).config.info.exact:
            by_layer.setdefault(site.layer, []).append(site)
    return by_layer


def require_count(count: int, layers: int) -> None:
    """That some of the converted `layers` stay converted."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < layers:
        raise InputError(f"between 1 and {layers - 1} of the {layers} converted layers can stay softmax; got {count!r}.")


def _exchange(site: Site) -> MechanismModule:
    """Softmax for the site's mechanism, which comes back."""
    before: MechanismModule = getattr(site.module, NAME)
    softmax = MechanismModule(Softmax(), heads=site.heads, kv_heads=site.kv_heads, head_dim=site.head_dim)
    site.module.add_module(NAME, softmax.train(site.module.training))
    return before


@torch.no_grad()
def _loss(original: PreTrainedModel, before: Sequence[Tensor], converted: PreTrainedModel, batches: Sequence[Batch]) -> float:
    whole = Whole()
    for states, batch in zip(before, batches, strict=True):
        whole.add(original, states, converted, batch)
    return whole.loss


def _write(converted: PreTrainedModel) -> None:
    kinds: dict[str, Any] = {site.name: getattr(site.module, NAME).config for site in sites(converted)}
    replace(records.of(converted), sites=records.described(kinds)).write(converted.config)
