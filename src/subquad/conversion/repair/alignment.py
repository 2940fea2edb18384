"""Alignment: around each new mechanism the projections change, too, so that its layer gives what the original's gave.

Each converted attention, or with targets="all" each layer around one, reads what the original hands to it there, and learns to
give the original's output:

    L = mean over attentions of  |y' - y|^2 / |y|^2,      or over layers of  |y' - y|^2 / |y - x|^2,  x being their input

by low-rank changes of its linear maps. No layer waits for another, errors do not add up on the way, and no vocabulary is read.
After Goldstein et al., 2025 (RADLADS, arXiv:2505.03005), who so align all weights of attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.conversion.activations import Batch, last_states, real_tokens
from subquad.conversion.repair.low_rank import RANK, LowRank, Targets, place
from subquad.conversion.sites import Site, sites
from subquad.conversion.swap import mechanisms
from subquad.errors import UnsupportedError

_TINY = 1e-9

Call = tuple[tuple[Any, ...], dict[str, Any], Tensor]  # what a module was given, and the states that it gave


class Align(LowRank):
    """Of `converted`, by `original` made watchable."""

    name, lr = "align", 1e-3

    def __init__(
        self, original: PreTrainedModel, converted: PreTrainedModel, rank: int = RANK, targets: Targets = "attention"
    ) -> None:
        new = converted_sites(converted)
        super().__init__(original, converted, rank, targets)
        self.adds = targets == "all"  # a layer adds to what it reads
        self.places = sorted({place(converted, site, targets) for site in new})

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad(), self._called() as calls:
            last_states(self.original, batch)
        losses = []
        for name, (args, given, before) in calls.items():
            after = _states(self.converted.base_model.get_submodule(name)(*args, **given))
            real = real_tokens(batch, before)
            scale = before - (args[0] if args else given["hidden_states"]) if self.adds else before
            missed, had = ((x.float().square().sum(-1) * real).sum() for x in (after - before, scale))
            losses.append(missed / had.clamp(min=_TINY))
        return torch.stack(losses).mean()

    @contextmanager
    def _called(self) -> Iterator[dict[str, Call]]:
        """What each place of the original is given, and gives, while it runs."""
        calls: dict[str, Call] = {}

        def take(name: str) -> Any:
            return lambda _, args, given, output: calls.update({name: (args, given, _states(output))})

        part = self.original.base_model
        handles = [part.get_submodule(name).register_forward_hook(take(name), with_kwargs=True) for name in self.places]
        try:
            yield calls
        finally:
            for handle in handles:
                handle.remove()


def converted_sites(converted: PreTrainedModel) -> list[Site]:
    """Those that do not attend by softmax; refused where all do."""
    new = mechanisms(converted)
    found = [site for site in sites(converted) if site.name in new]
    if not found:
        raise UnsupportedError(
            "alignment makes up for attention that is not softmax, and all of this model's is. Leave align out, or convert to "
            "another method."
        )
    return found


def _states(output: Any) -> Tensor:
    """Of what a module of Hugging Face's gives, the hidden states."""
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states
