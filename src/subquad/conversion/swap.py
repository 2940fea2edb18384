"""`convert`: another mechanism in the attention of a Hugging Face model; `revert`: its own attention again.

The attention modules stay, with their projections, positions and weight names. Each gets a mechanism as a submodule, which the
attention function named "subquad" calls instead of softmax: `model.layers.0.self_attn.subquad`.
"""

from __future__ import annotations

import copy as copying
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.attention import MechanismModule
from subquad.conversion import record as records
from subquad.conversion.caching import lets_generate, stop_caching
from subquad.conversion.interface import NAME
from subquad.conversion.pretrained import context_of
from subquad.conversion.record import Record
from subquad.conversion.sites import Site, sites
from subquad.errors import InputError, OptionError, UnsupportedError
from subquad.families.base import Mechanism
from subquad.mechanisms import Softmax
from subquad.registry import resolve

Model = TypeVar("Model", bound=PreTrainedModel)
Layers = str | Sequence[int]
_CHANGES = "set_attn_implementation"
_EVERY = re.compile(r"every (\d+)")


def convert(
    model: Model,
    method: str | Mechanism,
    *,
    layers: Layers = "all",
    keep_softmax: Sequence[int] = (),
    self_only: bool = True,
    copy: bool = False,
    beyond_context: bool = False,
) -> Model:
    """The model with its attention swapped for `method`; `revert` undoes it.

    Args:
        model: of Hugging Face, whose attention goes through the attention interface.
        method: a name or a config object.
        layers: "all", numbers of layers, or "every k" for layers 0, k, 2k, ...; in an encoder-decoder, of both stacks.
        keep_softmax: numbers of layers that stay as they are, whatever `layers` says.
        self_only: leave cross-attention as it is.
        copy: leave `model` as it is, and convert a copy.
        beyond_context: take prompts longer than the context that the model was made for.

    Returns:
        `model`, or the copy. New parameters start where the mechanism's paper starts them.

    Raises:
        SubquadError: this model, or one of its layers, cannot take the method; nothing has been changed then.
    """
    config = resolve(method)
    found = _convertible(model)
    chosen = _chosen(found, layers, keep_softmax, self_only)
    _require_able(config, chosen)
    names = {site.name for site in chosen}
    kinds = {site.name: config if site.name in names else Softmax() for site in found}
    target = copying.deepcopy(model) if copy else model
    _own_config(target)
    _forget_file(target)
    conversion = Record(
        sites=records.described(kinds),
        attention=model.config._attn_implementation,
        cache_layers=max((site.layer + 1 for site in found if _is_cached(site, kinds[site.name])), default=0),
        context=context_of(model.config) if any(site.is_causal for site in found) else None,
        is_beyond_allowed=beyond_context,
    )
    install(target, conversion)
    conversion.write(target.config)
    return target


def revert(model: Model) -> Model:
    """The model with its own attention again, as it was before `convert`; what was learned in the new maps is gone.

    Weights that `align` or `finetune` have changed stay so, with a warning: that model is not the original.
    """
    conversion = records.of(model)
    if conversion.has_other_weights:
        warnings.warn(
            "a low-rank repair has changed weights of this model for its mechanisms. They stay so: with softmax it is not the "
            "original. Load that again, or keep it: subquad.convert(model, method, copy=True).",
            stacklevel=2,
        )
    for site in sites(model):
        delattr(site.module, NAME)
    stop_caching(model)
    for part in model.modules():
        vars(part).pop(_CHANGES, None)
    model.set_attn_implementation(conversion.attention)
    del model.config.subquad
    return model


def install(model: PreTrainedModel, conversion: Record) -> None:
    """Mechanisms for every site, at their initial weights, where the site's own weights are."""
    kinds = conversion.configs()
    lenders: dict[tuple[Mechanism, str], MechanismModule] = {}
    for site in sites(model):
        mechanism = MechanismModule(kinds[site.name], heads=site.heads, kv_heads=site.kv_heads, head_dim=site.head_dim)
        near = next(site.module.parameters())
        mechanism.to(near.device, near.dtype).train(site.module.training)
        if mechanism.method.shares_parameters:
            lender = lenders.setdefault((mechanism.method, site.stack), mechanism)
            if lender is not mechanism:
                mechanism.borrow_parameters(lender)
        site.module.add_module(NAME, mechanism)
    model.set_attn_implementation(NAME)
    guard(model)


def guard(model: PreTrainedModel) -> None:
    """Its caches hold states of its mechanisms, and nobody sets another attention without `revert`."""
    setattr(model, _CHANGES, _keep)
    lets_generate(model)


def _keep(attn_implementation: Any, *_: Any, **__: Any) -> None:
    if attn_implementation != NAME:
        raise InputError(
            f"the attention of a converted model is its mechanisms; got {attn_implementation!r}. subquad.revert(model) first."
        )


def every_mechanism(model: PreTrainedModel) -> dict[str, MechanismModule]:
    """The mechanism of each site, by the site's name."""
    records.of(model)
    return {site.name: getattr(site.module, NAME) for site in sites(model)}


def mechanisms(model: PreTrainedModel) -> dict[str, MechanismModule]:
    """As `every_mechanism`, without those that are softmax."""
    return {name: mechanism for name, mechanism in every_mechanism(model).items() if not mechanism.method.info.exact}


def _own_config(model: PreTrainedModel) -> None:
    """A config that no other model shares: what is written into it is about this one."""
    copies: dict[int, Any] = {}
    copying.deepcopy(model.config, copies)
    for module in model.modules():
        if (own := copies.get(id(getattr(module, "config", None)))) is not None:
            module.config = own


def _forget_file(model: Any) -> None:
    """Weights that were quantised in a file, such as GGUF, are no longer so here, and are not saved so."""
    if getattr(model, "is_quantized", False):
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config


def _convertible(model: Any) -> list[Site]:
    if not isinstance(model, PreTrainedModel):
        adapted = " Merge its adapter first: model.merge_and_unload()." if hasattr(model, "merge_and_unload") else ""
        raise InputError(f"convert takes a Hugging Face PreTrainedModel; got {type(model).__name__}.{adapted}")
    if records.written(model.config) is not None:
        raise InputError(f"this {type(model).__name__} is converted already. subquad.revert(model) undoes that.")
    if type(model).__module__.startswith("subquad."):
        raise InputError(f"{type(model).__name__} is built on subquad; set `method` in its config instead of converting it.")
    found = sites(model)
    if any(_is_quantised(module) for site in found for module in site.module.modules()):
        raise UnsupportedError(
            f"this {type(model).__name__} is quantised, and new mechanisms are trained in its precision. Load it without "
            "quantisation, or call model.dequantize() first."
        )
    return found


def _is_quantised(module: nn.Module) -> bool:
    """Whether it computes with something else than plain tensors of 16 bits or more."""
    weights = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(
        type(weight.data) is not Tensor or weight.dtype.itemsize < 2 or not weight.is_floating_point() for weight in weights
    )


def _chosen(found: list[Site], layers: Layers, keep_softmax: Sequence[int], self_only: bool) -> list[Site]:
    known = sorted({site.layer for site in found})
    wanted = set(_numbers("layers", layers, known)) - set(_numbers("keep_softmax", keep_softmax, known))
    chosen = [site for site in found if site.layer in wanted and not (self_only and site.is_cross)]
    if not chosen:
        raise InputError(
            f"nothing is left to convert: layers={layers!r}, keep_softmax={list(keep_softmax)!r} of layers "
            f"{known[0]} to {known[-1]}. Name layers that are there, and keep fewer of them."
        )
    return chosen


def _numbers(field: str, given: Layers, known: list[int]) -> Iterable[int]:
    if given == "all":
        return known
    if isinstance(given, str):
        every = _EVERY.fullmatch(given)
        if every is None or int(every[1]) < 1:
            raise OptionError(f'{field} is "all", numbers of layers, or "every k" as in "every 2"; got {given!r}.')
        return known[:: int(every[1])]
    if not hasattr(given, "__iter__"):
        raise OptionError(f"{field} is a list of numbers of layers; got {given!r}.")
    for number in given:
        if isinstance(number, bool) or not isinstance(number, int) or number not in known:
            raise OptionError(f"{field} names layers {known[0]} to {known[-1]}, which the model has; got {number!r}.")
    return given


def _require_able(config: Mechanism, chosen: list[Site]) -> None:
    refused: dict[tuple[str, ...], list[str]] = {}
    for site in chosen:
        if reasons := site.why_not(config):
            refused.setdefault(tuple(reasons), []).append(site.name)
    if refused:
        lines = "".join(f"\n  - {', '.join(names)}: {'; '.join(reasons)}" for reasons, names in refused.items())
        raise UnsupportedError(
            f"these layers cannot take {config.info.name}, and nothing was converted:{lines}\n"
            "Name other layers, keep these softmax, or choose another method."
        )


def _is_cached(site: Site, config: Mechanism) -> bool:
    return site.is_causal and not site.has_bias and not config.reasons(["decode"])
