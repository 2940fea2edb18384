"""Low-rank changes of a converted model: linear maps learn W + B A.

Hu et al., 2021, arXiv:2106.09685, through `peft`. They are the projections of attention or, where more is lost, all linear maps
of the layers. What the mechanisms learn goes on learning beside them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from subquad import checks
from subquad.conversion import record as records
from subquad.conversion.repair.loop import Stage
from subquad.conversion.sites import Site, sites
from subquad.conversion.swap import mechanisms
from subquad.errors import OptionError, load_extra

Targets = Literal["attention", "all"]
ADAPTER = "repair"
RANK = 8  # the usual one


class LowRank(Stage):
    """Of `converted`; when all is learnt, `merge` adds the changes to the weights."""

    def __init__(self, original: PreTrainedModel, converted: PreTrainedModel, rank: int, targets: Targets) -> None:
        peft = need_peft()
        self.original, self.converted = original, converted
        changed = changed_maps(converted, rank, require_targets(targets))
        is_turned = any(isinstance(converted.get_submodule(name), Conv1D) for name in changed)  # GPT-2 keeps W^T
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=changed, fan_in_fan_out=is_turned)
        self._peft = peft
        peft.inject_adapter_in_model(config, converted, adapter_name=ADAPTER)
        for name, parameter in converted.named_parameters():
            parameter.requires_grad_(".lora_" in name or ".subquad." in name)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.converted.named_parameters() if p.requires_grad}

    def train(self, mode: bool) -> None:
        """The mechanisms alone: dropout would be one more thing to match."""
        self.converted.eval()
        for mechanism in mechanisms(self.converted).values():
            mechanism.train(mode)

    def merge(self) -> None:
        """The changes into the weights, which keep their names; all of them learn again. The config remembers it."""
        for module in list(self.converted.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, self._peft.tuners.lora.LoraLayer):
                    child.merge(adapter_names=[ADAPTER])
                    setattr(module, name, child.get_base_layer())
        del self.converted.peft_config
        replace(records.of(self.converted), has_other_weights=True).write(self.converted.config)
        self.converted.requires_grad_(True)


def require_targets(targets: str) -> Targets:
    if targets not in get_args(Targets):
        raise OptionError(f"the targets of low-rank changes are one of {', '.join(get_args(Targets))}; got {targets!r}.")
    return cast(Targets, targets)


def place(model: PreTrainedModel, site: Site, targets: Targets) -> str:
    """The name, below the model without its head, of what changes around a site: of its attention, or of its whole layer."""
    parts = site.name.split(".")
    if targets == "all":  # what is behind the number in its name
        return ".".join(parts[: max(i for i, part in enumerate(parts) if part.isdigit()) + 1])
    around = ".".join(parts[:-1])  # where a site stands inside another module of attention, this one
    return around if type(model.base_model.get_submodule(around)).__name__.endswith("Attention") else site.name


def changed_maps(model: PreTrainedModel, rank: int, targets: Targets) -> list[str]:
    """The linear maps that change, by their whole names; refused is a rank that none of them has."""
    checks.sizes(rank=rank)
    names = {id(module): name for name, module in model.named_modules()}
    places = [model.base_model.get_submodule(place(model, site, targets)) for site in sites(model)]
    maps = {id(child) for module in places for child in module.modules() if isinstance(child, (nn.Linear, Conv1D))}
    changed = sorted(names[key] for key in maps)
    full = max(min(cast(Tensor, model.get_submodule(name).weight).shape) for name in changed)
    if rank > full:
        raise OptionError(f"the rank of a change is at most {full}, the whole of the largest map that changes; got {rank}.")
    return changed


def need_peft() -> Any:
    [peft] = load_extra("convert", "low-rank finetuning", "peft")
    return peft
