"""Alignment: low-rank changes of the projections around each mechanism, so that its layer returns what the original returns.

Each converted attention, or with targets="all" each layer around one, gets the input that it has in the original model, and
learns to return the original's output:

    L = mean over attentions of  |y' - y|^2 / |y|^2,      or over layers of  |y' - y|^2 / |y - x|^2,  where x is their input.

Layers learn independently, errors do not add up from layer to layer, and the vocabulary is not needed. After Goldstein et al.,
2025 (RADLADS, arXiv:2505.03005), who align all weights of attention in this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.conversion.activations import Batch, last_hidden_states, real_tokens
from subquad.conversion.repair.low_rank import RANK, LowRank, Targets, target_module
from subquad.errors import UnsupportedError
from subquad.models.converted.installation import mechanisms
from subquad.models.converted.sites import Site, sites

_TINY = 1e-9

Call = tuple[tuple[Any, ...], dict[str, Any], Tensor]  # the arguments of a module, and the hidden states that it returned


class Align(LowRank):
    """Trains `converted` to match `original`, which must be `recordable`."""

    name, lr = "align", 1e-3

    def __init__(
        self, original: PreTrainedModel, converted: PreTrainedModel, rank: int = RANK, targets: Targets = "attention"
    ) -> None:
        new = converted_sites(converted)
        super().__init__(original, converted, rank, targets)
        self.is_residual = targets == "all"  # a layer adds to its input
        self.targets = sorted({target_module(converted, site, targets) for site in new})

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad(), self._called() as calls:
            last_hidden_states(self.original, batch)
        losses = []
        for name, (args, given, before) in calls.items():
            after = _states(self.converted.base_model.get_submodule(name)(*args, **given))
            real = real_tokens(batch, before)
            scale = before - (args[0] if args else given["hidden_states"]) if self.is_residual else before
            error, size = ((x.float().square().sum(-1) * real).sum() for x in (after - before, scale))
            losses.append(error / size.clamp(min=_TINY))
        return torch.stack(losses).mean()

    @contextmanager
    def _called(self) -> Iterator[dict[str, Call]]:
        """The call of each target module in the original, while it runs."""
        calls: dict[str, Call] = {}

        def recorder(name: str) -> Any:
            return lambda _, args, given, output: calls.update({name: (args, given, _states(output))})

        base = self.original.base_model
        handles = [base.get_submodule(name).register_forward_hook(recorder(name), with_kwargs=True) for name in self.targets]
        try:
            yield calls
        finally:
            for handle in handles:
                handle.remove()


def converted_sites(converted: PreTrainedModel) -> list[Site]:
    """The sites that are not softmax; an error if there are none."""
    new = mechanisms(converted)
    found = [site for site in sites(converted) if site.name in new]
    if not found:
        raise UnsupportedError(
            "alignment repairs attention that is not softmax, and all attention of this model is softmax. Leave align out, or "
            "convert to another method."
        )
    return found


def _states(output: Any) -> Tensor:
    """The hidden states in the output of a Hugging Face module."""
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states
