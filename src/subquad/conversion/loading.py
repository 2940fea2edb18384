"""What `subquad.pretrained` does with a model whose config speaks of a conversion, before and after its weights are read."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from subquad.conversion import record as records
from subquad.conversion.interface import NAME
from subquad.conversion.sites import found_in
from subquad.conversion.swap import guard, install
from subquad.errors import InputError
from subquad.models.loading import misfits, refuse, settle


def restore(model: PreTrainedModel) -> None:
    """Put the mechanisms in, if all that was converted is here: in the model without its head, which comes first."""
    conversion = records.of(model)
    sites = {site.name: site.module for site in found_in(model)}
    if set(sites) != set(conversion.sites):
        return
    if all(hasattr(module, NAME) for module in sites.values()):
        guard(model)
    else:
        install(model, conversion)


def finish(model: PreTrainedModel, info: dict[str, Any], path: object) -> None:
    """Refuse weights that are missing or left over; otherwise the model computes what it did when it was saved."""
    if not all(hasattr(site.module, NAME) for site in found_in(model)):
        raise InputError(
            f"the model in {path} was converted as a whole, and {type(model).__name__} has not all of its layers. "
            f"Load it with {' or '.join(model.config.architectures or ['the class that saved it'])}."
        )
    advice = "Load it with the class that saved it, from all of its files; or convert it again."
    refuse(misfits(info), type(model).__name__, path, advice)
    settle(model)
