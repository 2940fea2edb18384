"""What the config of a converted model holds, and `save_pretrained` writes into config.json.

    subquad                which mechanism each attention has: a `ConversionRecord`
    quantization_config    {"quant_method": "subquad"}, by which transformers finds `quantizer.ConvertedModelQuantizer`
    attn_implementation    `SAVED_ATTENTION`, by which a process without subquad refuses the model

Version 1 had the first of them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from transformers import PreTrainedConfig, PreTrainedModel

from subquad.errors import InputError, shown
from subquad.families.base import Mechanism
from subquad.registry import from_record, to_record
from subquad.runs import typed_json
from subquad.runs.results_file import Count
from subquad.runs.typed_json import Between, MisfitError

NAME = "subquad"  # of the attention implementation, of the quantizer, and of the mechanism inside an attention module
# Where subquad is not imported, transformers puts this text into its error: `attn_implementation="…" is not supported`.
SAVED_ATTENTION = "subquad: this model was converted. Load it with subquad.load, or import subquad.models first"
VERSION = 2
_RENAMED = {"is_beyond_allowed": "beyond_context", "has_other_weights": "has_changed_weights"}  # since version 1


@dataclass(frozen=True)
class ConversionRecord:
    """How a model was converted.

    Args:
        sites: the mechanism of each attention site with all its options; softmax for sites that were left alone.
        attention: the attention implementation that the model had before.
        cache_layers: the number of layers of its cache; 0 if it has no cache.
        context: the length that the model was trained for; None for no limit.
        beyond_context: whether longer prompts are accepted.
        has_changed_weights: whether a repair has changed weights of the original model.
    """

    sites: dict[str, dict[str, Any]] = field(default_factory=dict)
    attention: str = "sdpa"
    cache_layers: Annotated[int, Between(0, 100_000)] = 0
    context: Count | None = None
    beyond_context: bool = False
    has_changed_weights: bool = False

    def mechanisms(self) -> dict[str, Mechanism]:
        """The mechanism of each site."""
        return {name: from_record(saved) for name, saved in self.sites.items()}

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "version": VERSION}

    def write(self, config: PreTrainedConfig) -> None:
        """Mark `config` as that of a converted model."""
        config.subquad = self.to_json()
        config.quantization_config = {"quant_method": NAME}
        config.attn_implementation = SAVED_ATTENTION


def erase(config: PreTrainedConfig) -> None:
    """Undo `ConversionRecord.write`."""
    for name in ("subquad", "quantization_config", "attn_implementation"):
        delattr(config, name)


def site_records(mechanisms: Mapping[str, Mechanism]) -> dict[str, Any]:
    """The field `sites` of a record."""
    return {name: to_record(mechanism) for name, mechanism in mechanisms.items()}


def read(config: Any) -> ConversionRecord | None:
    """The record in a config; None if its model is not converted."""
    saved = getattr(config, "subquad", None)
    return None if saved is None else from_json(saved)


def from_json(saved: Any) -> ConversionRecord:
    """The record that `to_json` wrote, in this version or in version 1."""
    if not isinstance(saved, dict) or saved.get("version") not in (1, VERSION):
        raise InputError(
            f"config.subquad must be a conversion record of version 1 or {VERSION}; got {shown(saved)}, written by "
            "another version of subquad. Convert the model again, or install that version."
        )
    renamed = {_RENAMED.get(name, name): value for name, value in saved.items() if name != "version"}
    try:
        found: ConversionRecord = typed_json.parse(ConversionRecord, renamed)
        for name, mechanism in found.sites.items():
            typed_json.parse(str, mechanism.get("name"), f"the mechanism of {name!r}")
    except MisfitError as error:
        raise InputError(f"config.subquad is not a conversion record: {error}. Convert the model again.") from error
    return found


def installed(config: Any) -> ConversionRecord | None:
    """As `read`, for every call of a model in this process: its record was checked when the model was converted or loaded."""
    saved = getattr(config, "subquad", None)
    return None if saved is None else ConversionRecord(**{name: saved[name] for name in saved if name != "version"})


def require(model: PreTrainedModel) -> ConversionRecord:
    """The record of a converted model; an error for another model."""
    found = read(model.config)
    if found is None:
        raise InputError(f"this {type(model).__name__} is not converted. Convert it first: subquad.convert(model, method).")
    return found
