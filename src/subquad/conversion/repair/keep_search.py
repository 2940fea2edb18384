"""Keep search: which k layers should stay softmax.

Greedy: of all converted layers, the one whose return to softmax lowers the loss most becomes softmax again, then the next one,
k times. For L layers that evaluates k (2 L - k + 1) / 2 models. Nothing is trained in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.attention import MechanismModule
from subquad.conversion.activations import Batch, recordable, run_recorded
from subquad.conversion.diagnosis import ModelComparison, require_pair, require_tokens
from subquad.errors import InputError
from subquad.mechanisms import Softmax
from subquad.models.converted import record
from subquad.models.converted.installation import all_mechanisms, put_mechanism
from subquad.models.converted.record import NAME
from subquad.models.converted.sites import Site, sites
from subquad.runs.results_file import Count
from subquad.runs.typed_json import Figure

Trial = tuple[Count, Count, Figure]  # the number of layers kept so far, one more layer, and the loss with it


@dataclass(frozen=True)
class Kept:
    """The result of a keep search.

    Args:
        layers: that stay softmax, the most useful first.
        losses: before the search, and after each of these layers.
        tried: every trial.
    """

    layers: tuple[Count, ...]
    losses: tuple[Figure, ...]
    tried: tuple[Trial, ...]


def keep_softmax(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Sequence[Batch],
    count: int,
    *,
    known: Sequence[Trial] = (),
    on_trial: Callable[[Sequence[Trial], int], object] = lambda tried, total: None,
) -> Kept:
    """Put softmax back into the `count` layers of `converted` where that helps most; the other layers keep their weights.

    Args:
        known: trials of the same search before it was stopped; they are not repeated.
        on_trial: called with all trials so far, and with the number of trials in all.
    """
    require_tokens(batches)
    require_pair(original, converted)
    by_layer = converted_layers(converted)
    require_count(count, len(by_layer))
    known_losses = {(kept, layer): loss for kept, layer, loss in known}
    total = count * (2 * len(by_layer) - count + 1) // 2
    kept: list[int] = []
    tried: list[Trial] = []
    was_training = converted.training
    converted.eval()
    with recordable(original) as teacher:
        before = [run_recorded(teacher, batch)[1] for batch in batches]

        def loss() -> float:
            return _loss(teacher, before, converted, batches)

        losses = [loss()]
        for _ in range(count):
            found = {}
            for layer in sorted(set(by_layer) - set(kept)):
                if (len(kept), layer) in known_losses:
                    found[layer] = known_losses[len(kept), layer]
                else:
                    own = [_swap_in_softmax(site) for site in by_layer[layer]]
                    try:
                        found[layer] = loss()
                    finally:
                        for site, mechanism in zip(by_layer[layer], own, strict=True):
                            site.module.add_module(NAME, mechanism)
                tried.append((len(kept), layer, found[layer]))
                on_trial(tried, total)
            best = min(found, key=lambda layer: found[layer])
            for site in by_layer[best]:
                _swap_in_softmax(site)
            kept.append(best)
            losses.append(found[best])
    _update_record(converted)
    converted.train(was_training)
    return Kept(tuple(kept), tuple(losses), tuple(tried))


def converted_layers(converted: PreTrainedModel) -> dict[int, list[Site]]:
    """The sites that are not softmax, by layer."""
    by_layer: dict[int, list[Site]] = {}
    for site in sites(converted):
        if not getattr(site.module, NAME).method.info.exact:
            by_layer.setdefault(site.layer, []).append(site)
    return by_layer


def require_count(count: int, layers: int) -> None:
    """Refuse to keep no layer, or all of them."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < layers:
        raise InputError(f"between 1 and {layers - 1} of the {layers} converted layers can stay softmax; got {count!r}.")


def _swap_in_softmax(site: Site) -> MechanismModule:
    """Put softmax into the site, and return the mechanism that it had."""
    before: MechanismModule = getattr(site.module, NAME)
    put_mechanism(site, Softmax())
    return before


@torch.no_grad()
def _loss(original: PreTrainedModel, before: Sequence[Tensor], converted: PreTrainedModel, batches: Sequence[Batch]) -> float:
    whole = ModelComparison()
    for states, batch in zip(before, batches, strict=True):
        whole.add(original, states, converted, batch)
    return whole.loss


def _update_record(converted: PreTrainedModel) -> None:
    methods = {name: mechanism.method for name, mechanism in all_mechanisms(converted).items()}
    replace(record.require(converted), sites=record.site_records(methods)).write(converted.config)
