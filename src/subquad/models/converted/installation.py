"""Putting mechanisms into the attention modules of a Hugging Face model, and taking them out again.

The attention modules stay, with their projections, positions and weight names. Each gets a mechanism as a submodule, such as
`model.layers.0.self_attn.subquad`, which the attention function "subquad" calls instead of softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from subquad.attention import MechanismModule
from subquad.errors import InputError, UnsupportedError
from subquad.families.base import Mechanism
from subquad.models.converted import record
from subquad.models.converted.caches import use_ordinary_caches, use_subquad_caches
from subquad.models.converted.interface import USED
from subquad.models.converted.record import NAME, ConversionRecord
from subquad.models.converted.sites import Site, sites

_SET_ATTENTION = "set_attn_implementation"


def install(model: PreTrainedModel, conversion: ConversionRecord) -> None:
    """A mechanism for every site, with initial weights on the device of the site's own weights."""
    wanted = conversion.mechanisms()
    found = sites(model)
    lenders: dict[tuple[Mechanism, str], MechanismModule] = {}
    for site in found:
        mechanism = put_mechanism(site, wanted[site.name])
        if mechanism.method.shares_parameters:
            lender = lenders.setdefault((mechanism.method, site.stack), mechanism)
            if lender is not mechanism:
                mechanism.borrow_parameters(lender)
        setattr(site.module, USED, False)
        site.module.register_forward_hook(_require_use)
    model.set_attn_implementation(NAME)
    setattr(model, _SET_ATTENTION, _refuse_attention)
    use_subquad_caches(model, found)


def uninstall(model: PreTrainedModel, attention: str) -> None:
    """Undo `install`; `attention` is the implementation that the model had before."""
    for site in sites(model):
        delattr(site.module, NAME)
        delattr(site.module, USED)
        for key, hook in list(site.module._forward_hooks.items()):
            if hook is _require_use:
                del site.module._forward_hooks[key]
    use_ordinary_caches(model)
    for part in model.modules():
        vars(part).pop(_SET_ATTENTION, None)
    model.set_attn_implementation(attention)


def put_mechanism(site: Site, method: Mechanism) -> MechanismModule:
    """A new module of `method` in `site`."""
    mechanism = MechanismModule(method, heads=site.heads, kv_heads=site.kv_heads, head_dim=site.head_dim)
    near = next(site.module.parameters())
    site.module.add_module(NAME, mechanism.to(near.device, near.dtype).train(site.module.training))
    return mechanism


def all_mechanisms(model: PreTrainedModel) -> dict[str, MechanismModule]:
    """The mechanism of each site, by the name of the site."""
    record.require(model)
    return {site.name: getattr(site.module, NAME) for site in sites(model)}


def mechanisms(model: PreTrainedModel) -> dict[str, MechanismModule]:
    """The mechanisms of a converted model that are not softmax, by the name of their site."""
    return {name: mechanism for name, mechanism in all_mechanisms(model).items() if not mechanism.method.info.exact}


def _refuse_attention(attn_implementation: Any, *_: Any, **__: Any) -> None:
    if attn_implementation != NAME:
        raise InputError(
            "the attention of a converted model is computed by its mechanisms; got "
            f"attn_implementation={attn_implementation!r}. Call subquad.revert(model) first."
        )


def _require_use(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """A model may declare an attention that does not go through the attention interface: its conversion must not be silent."""
    if not torch.compiler.is_compiling() and not getattr(module, USED):
        raise UnsupportedError(
            f"{type(module).__name__} does not call Hugging Face's attention interface, so its mechanism has no effect. Call "
            "subquad.revert(model), and convert without this layer."
        )
