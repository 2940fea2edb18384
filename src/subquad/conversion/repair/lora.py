"""Low-rank finetuning: linear maps learn small changes, W + B A, to make up for what is lost.

Hu et al., 2021, arXiv:2106.09685, through `peft`; the second stage of LoLCATs. They are the projections of attention or, where
more is lost, all linear maps of the layers. The new maps go on learning beside them. What is matched needs no labels of a task:

    "language"    the next token of the text
    "distil"      the original's distribution over the next token, KL(p || p')
    "embedding"   the original's last hidden states, |h' - h|^2 / |h|^2
"""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from subquad.conversion.observe import Batch, is_causal_lm, last_states, real_tokens
from subquad.conversion.repair.by_rows import cross_entropy, divergence, mean_loss
from subquad.conversion.repair.loop import Stage
from subquad.conversion.sites import Site, sites
from subquad.conversion.swap import mechanisms
from subquad.errors import InputError, OptionError
from subquad.extras import need

Loss = Literal["language", "distil", "embedding"]
Targets = Literal["attention", "all"]
ADAPTER = "repair"


class Lora(Stage):
    """Of `converted`; when all is learnt, `merge` adds the changes to the weights."""

    name = "lora"

    def __init__(
        self,
        original: PreTrainedModel,
        converted: PreTrainedModel,
        loss: Loss | None = None,
        rank: int = 8,
        targets: Targets = "attention",
    ) -> None:
        peft = need_peft()
        self.kind = kind_of(converted, loss)
        self.original, self.converted = original, converted
        changed = _maps(converted, require_targets(targets))
        is_turned = any(isinstance(converted.get_submodule(name), Conv1D) for name in changed)  # GPT-2 keeps W^T
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=changed, fan_in_fan_out=is_turned)
        self._peft = peft
        peft.inject_adapter_in_model(config, converted, adapter_name=ADAPTER)
        for name, parameter in converted.named_parameters():
            parameter.requires_grad_(".lora_" in name or ".subquad." in name)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.converted.named_parameters() if p.requires_grad}

    def loss(self, batch: Batch) -> Tensor:
        after = last_states(self.converted, batch)
        real = real_tokens(batch, after)
        if self.kind == "embedding":
            before = self._before(batch)
            missed, had = ((x.square().sum(-1) * real).sum() for x in (after - before, before))
            return missed / had
        known = real[:, 1:] & real[:, :-1]
        head: Any = self.converted.get_output_embeddings()
        if self.kind == "language":
            loss = cross_entropy(batch["input_ids"].to(after.device)[:, 1:][known])
        else:
            loss = divergence(self._before(batch)[:, :-1][known], head)
        return mean_loss(after[:, :-1][known], head, head.weight.shape[0], loss)

    def train(self, mode: bool) -> None:
        """The mechanisms alone: dropout would be one more thing to match."""
        self.converted.eval()
        for mechanism in mechanisms(self.converted).values():
            mechanism.train(mode)

    def merge(self) -> None:
        """The changes into the weights, which keep their names; all of them learn again."""
        for module in list(self.converted.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, self._peft.tuners.lora.LoraLayer):
                    child.merge(adapter_names=[ADAPTER])
                    setattr(module, name, child.get_base_layer())
        del self.converted.peft_config
        self.converted.requires_grad_(True)

    @torch.no_grad()
    def _before(self, batch: Batch) -> Tensor:
        return last_states(self.original, batch)


def kind_of(converted: PreTrainedModel, loss: str | None) -> Loss:
    """The loss to take for a model, by default the one of its kind."""
    is_causal = is_causal_lm(converted)
    kind = loss or ("language" if is_causal else "embedding")
    if kind not in get_args(Loss):
        raise OptionError(f"the loss of a low-rank finetune is one of {', '.join(get_args(Loss))}; got {kind!r}.")
    if kind != "embedding" and not is_causal:
        raise InputError(f"the {kind} loss is of causal language models; got {type(converted).__name__}. Use embedding.")
    return cast(Loss, kind)


def require_targets(targets: str) -> Targets:
    if targets not in get_args(Targets):
        raise OptionError(f"the targets of a low-rank finetune are one of {', '.join(get_args(Targets))}; got {targets!r}.")
    return cast(Targets, targets)


def _maps(model: PreTrainedModel, targets: Targets) -> list[str]:
    """The linear maps that change, by their whole names: of the attention modules, or of all layers around them."""
    names = {id(module): name for name, module in model.named_modules()}
    found = set()
    for site in sites(model):
        place = _layer(model, site) if targets == "all" else _attention(model, site)
        found |= {names[id(child)] for child in place.modules() if isinstance(child, (nn.Linear, Conv1D))}
    return sorted(found)


def _attention(model: PreTrainedModel, site: Site) -> nn.Module:
    """The module of a site; where that stands inside another one of attention, this one."""
    around = model.base_model.get_submodule(site.name.rpartition(".")[0])
    return around if type(around).__name__.endswith("Attention") else site.module


def _layer(model: PreTrainedModel, site: Site) -> nn.Module:
    """The layer that a site stands in: what is behind the number in its name."""
    parts = site.name.split(".")
    number = max(i for i, part in enumerate(parts) if part.isdigit())
    return model.base_model.get_submodule(".".join(parts[: number + 1]))


def need_peft() -> Any:
    [peft] = need("convert", "low-rank finetuning", "peft")
    return peft
