"""Low-rank changes (LoRA) of a converted model: linear layers W become W + B A.

Hu et al., 2021, arXiv:2106.09685, with `peft`. The maps are the projections of attention or, if more was lost, all linear maps
of the layers. The parameters of the mechanisms are trained with them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from subquad import checks
from subquad.conversion.repair.loop import Stage
from subquad.errors import OptionError, load_extra
from subquad.models.converted import record
from subquad.models.converted.installation import mechanisms
from subquad.models.converted.sites import Site, sites

Targets = Literal["attention", "all"]
ADAPTER = "repair"
RANK = 8  # by default


class LowRank(Stage):
    """A stage that trains low-rank changes of `converted`; at the end, `merge` adds them to the weights."""

    def __init__(self, original: PreTrainedModel, converted: PreTrainedModel, rank: int, targets: Targets) -> None:
        peft = need_peft()
        self.original, self.converted = original, converted
        changed = changed_maps(converted, rank, require_targets(targets))
        is_transposed = any(isinstance(converted.get_submodule(name), Conv1D) for name in changed)  # GPT-2 holds W^T
        options = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=changed, fan_in_fan_out=is_transposed)
        self._peft = peft
        peft.inject_adapter_in_model(options, converted, adapter_name=ADAPTER)
        for name, parameter in converted.named_parameters():
            parameter.requires_grad_(".lora_" in name or ".subquad." in name)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.converted.named_parameters() if p.requires_grad}

    def train(self, mode: bool) -> None:
        """Train the mechanisms only: dropout in the other modules would be one more thing to match."""
        self.converted.eval()
        for mechanism in mechanisms(self.converted).values():
            mechanism.train(mode)

    def merge(self) -> None:
        """Add the changes to the weights, which keep their names, and make all weights trainable again. The record notes it."""
        for module in list(self.converted.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, self._peft.tuners.lora.LoraLayer):
                    child.merge(adapter_names=[ADAPTER])
                    setattr(module, name, child.get_base_layer())
        del self.converted.peft_config
        replace(record.require(self.converted), has_changed_weights=True).write(self.converted.config)
        self.converted.requires_grad_(True)


def require_targets(targets: str) -> Targets:
    if targets not in get_args(Targets):
        raise OptionError(f"the targets of low-rank changes must be one of {', '.join(get_args(Targets))}; got {targets!r}.")
    return cast(Targets, targets)


def target_module(model: PreTrainedModel, site: Site, targets: Targets) -> str:
    """The module that changes around a site: its attention, or its whole layer. The name is relative to the base model."""
    parts = site.name.split(".")
    if targets == "all":  # up to the layer number
        return ".".join(parts[: max(i for i, part in enumerate(parts) if part.isdigit()) + 1])
    around = ".".join(parts[:-1])  # BERT's attention is inside another attention module, with the output projection
    return around if type(model.base_model.get_submodule(around)).__name__.endswith("Attention") else site.name


def changed_maps(model: PreTrainedModel, rank: int, targets: Targets) -> list[str]:
    """The full names of the linear maps that change; an error if `rank` exceeds the rank of all of them."""
    checks.sizes(rank=rank)
    names = {id(module): name for name, module in model.named_modules()}
    modules = [model.base_model.get_submodule(target_module(model, site, targets)) for site in sites(model)]
    maps = {id(child) for module in modules for child in module.modules() if isinstance(child, (nn.Linear, Conv1D))}
    changed = sorted(names[key] for key in maps)
    full = max(min(cast(Tensor, model.get_submodule(name).weight).shape) for name in changed)
    if rank > full:
        raise OptionError(
            f"the rank of a change must be at most {full}, the full rank of the largest map that changes; got {rank}."
        )
    return changed


def need_peft() -> Any:
    [peft] = load_extra("convert", "low-rank finetuning", "peft")
    return peft
