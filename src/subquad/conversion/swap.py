"""`convert`: another mechanism in the attention of a Hugging Face model. `revert`: its own attention again."""

from __future__ import annotations

import copy as copying
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.conversion.pretrained import context_of
from subquad.errors import InputError, OptionError, UnsupportedError
from subquad.families.base import Mechanism
from subquad.mechanisms import Softmax
from subquad.models.converted import record
from subquad.models.converted.installation import install, uninstall
from subquad.models.converted.record import ConversionRecord
from subquad.models.converted.sites import Site, sites
from subquad.registry import resolve

Model = TypeVar("Model", bound=PreTrainedModel)
Layers = str | Sequence[int]
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
    """Replace the attention of `model` by `method`; `revert` undoes it.

    Args:
        model: a Hugging Face model whose attention goes through the attention interface.
        method: a name or a mechanism.
        layers: "all", layer numbers, or "every k" for layers 0, k, 2k, ...; in an encoder-decoder, of both stacks.
        keep_softmax: numbers of layers that are left alone, whatever `layers` says.
        self_only: leave cross-attention alone.
        copy: convert a copy, and leave `model` alone.
        beyond_context: accept prompts longer than the context that the model was trained for.

    Returns:
        `model`, or the copy. New parameters have the initial values of the mechanism's paper.

    Raises:
        SubquadError: the model, or one of its layers, cannot use the method. Nothing has been changed then.
    """
    mechanism = resolve(method)
    found = _convertible(model)
    chosen = _chosen(found, layers, keep_softmax, self_only)
    _require_able(mechanism, chosen)
    names = {site.name for site in chosen}
    wanted = {site.name: mechanism if site.name in names else Softmax() for site in found}
    target = copying.deepcopy(model) if copy else model
    _own_config(target)
    _drop_quantization(target)
    conversion = ConversionRecord(
        sites=record.site_records(wanted),
        attention=model.config._attn_implementation,
        cache_layers=max((site.layer + 1 for site in found if _is_cached(site, wanted[site.name])), default=0),
        context=context_of(model.config) if any(site.is_causal for site in found) else None,
        beyond_context=beyond_context,
    )
    install(target, conversion)
    conversion.write(target.config)
    return target


def revert(model: Model) -> Model:
    """The model with its own attention again, as before `convert`. What the mechanisms have learned is lost.

    Weights that `align` or `finetune` have changed stay changed, with a warning: the model is then not the original.
    """
    conversion = record.require(model)
    if conversion.has_changed_weights:
        warnings.warn(
            "align or finetune has changed weights of this model, and revert does not undo that: the result is "
            "not the original model. Load the original again, or convert a copy: subquad.convert(model, method, copy=True).",
            stacklevel=2,
        )
    uninstall(model, conversion.attention)
    record.erase(model.config)
    return model


def _own_config(model: PreTrainedModel) -> None:
    """Give the model its own copy of its config, as other models may share it."""
    copies: dict[int, Any] = {}
    copying.deepcopy(model.config, copies)
    for module in model.modules():
        if (own := copies.get(id(getattr(module, "config", None)))) is not None:
            module.config = own


def _drop_quantization(model: Any) -> None:
    """Weights from a quantized file, such as GGUF, have been unpacked: the model is no longer quantized, nor saved as such."""
    if getattr(model, "is_quantized", False):
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config


def _convertible(model: Any) -> list[Site]:
    if not isinstance(model, PreTrainedModel):
        adapter = " Merge its adapter first: model.merge_and_unload()." if hasattr(model, "merge_and_unload") else ""
        raise InputError(f"convert takes a Hugging Face PreTrainedModel; got {type(model).__name__}.{adapter}")
    if record.read(model.config) is not None:
        raise InputError(f"this {type(model).__name__} is converted already. Call subquad.revert(model) first.")
    if type(model).__module__.startswith("subquad."):
        raise InputError(f"{type(model).__name__} is a subquad model. Set `method` in its config instead of converting it.")
    found = sites(model)
    if any(_is_quantized(module) for site in found for module in site.module.modules()):
        raise UnsupportedError(
            f"this {type(model).__name__} is quantized, and mechanisms are trained in the precision of the model. Load it "
            "without quantization, or call model.dequantize() first."
        )
    return found


def _is_quantized(module: nn.Module) -> bool:
    """Whether it has weights other than plain floating-point tensors of 16 bits or more."""
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
            f"no layer is left to convert: layers={layers!r}, keep_softmax={list(keep_softmax)!r}; the model has layers "
            f"{known[0]} to {known[-1]}. Keep fewer of them."
        )
    return chosen


def _numbers(field: str, given: Layers, known: list[int]) -> Iterable[int]:
    if given == "all":
        return known
    if isinstance(given, str):
        every = _EVERY.fullmatch(given)
        if every is None or int(every[1]) < 1:
            raise OptionError(f'{field} must be "all", layer numbers, or "every k" such as "every 2"; got {given!r}.')
        return known[:: int(every[1])]
    if not hasattr(given, "__iter__"):
        raise OptionError(f"{field} must be a list of layer numbers; got {given!r}.")
    for number in given:
        if isinstance(number, bool) or not isinstance(number, int) or number not in known:
            raise OptionError(
                f"{field} must be numbers of layers that the model has, {known[0]} to {known[-1]}; got {number!r}."
            )
    return given


def _require_able(mechanism: Mechanism, chosen: list[Site]) -> None:
    refused: dict[tuple[str, ...], list[str]] = {}
    for site in chosen:
        if reasons := site.why_not(mechanism):
            refused.setdefault(tuple(reasons), []).append(site.name)
    if refused:
        lines = "".join(f"\n  - {', '.join(names)}: {'; '.join(reasons)}" for reasons, names in refused.items())
        raise UnsupportedError(
            f"these layers cannot use {mechanism.info.name}, and nothing was converted:{lines}\n"
            "Choose other layers, keep softmax in these, or choose another method."
        )


def _is_cached(site: Site, mechanism: Mechanism) -> bool:
    return site.is_causal and not site.has_bias and not mechanism.reasons(["decode"])
