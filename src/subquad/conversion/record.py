"""What a config remembers of a conversion: `config.subquad`, written into config.json by `save_pretrained`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from subquad.errors import InputError
from subquad.families.base import Mechanism
from subquad.registry import from_record, to_record

VERSION = 1


@dataclass(frozen=True)
class Record:
    """A conversion.

    Args:
        sites: the mechanism of each site with all its options, softmax where nothing was changed.
        attention: the implementation that the model had before.
        cache_layers: of a cache for it; 0 if it has none.
        context: tokens that the model was made for, or None where nothing limits them.
        is_beyond_allowed: whether longer prompts are taken.
        has_other_weights: a repair has changed weights that the model had before.
    """

    sites: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    cache_layers: int = 0
    context: int | None = None
    is_beyond_allowed: bool = False
    has_other_weights: bool = False
    version: int = VERSION

    def configs(self) -> dict[str, Mechanism]:
        return {name: from_record(saved) for name, saved in self.sites.items()}

    def write(self, config: PreTrainedConfig) -> None:
        config.subquad = asdict(self)


def written(config: Any) -> Record | None:
    """The conversion that a config speaks of, if any."""
    found = getattr(config, "subquad", None)
    if found is None:
        return None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise InputError(f"this config is of a conversion by another version of subquad; got {found!r}. Convert again.")
    return Record(**found)


def described(configs: dict[str, Mechanism]) -> dict[str, Any]:
    return {name: to_record(config) for name, config in configs.items()}


def of(model: PreTrainedModel) -> Record:
    """The conversion of a model; refused where there is none."""
    found = written(model.config)
    if found is None:
        raise InputError(f"this {type(model).__name__} is not converted. Convert it first: subquad.convert(model, method).")
    return found
