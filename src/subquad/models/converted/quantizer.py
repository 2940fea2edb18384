"""How `from_pretrained` loads a converted model: as a quantization method called "subquad".

A registered quantizer is Hugging Face's way to change the modules of a model between its construction and the loading of its
weights. This one quantizes nothing: it installs the mechanisms that config.json records, so that their weights are loaded with
all others. Afterwards the model is an ordinary one: it trains, casts and saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from subquad.errors import InputError
from subquad.models import weight_files, weights
from subquad.models.converted import record
from subquad.models.converted.installation import install
from subquad.models.converted.record import NAME, SAVED_ATTENTION
from subquad.models.converted.sites import sites

_ADVICE = "Load it from all of its files, with the class that saved it; or convert it again."


class ConvertedModelConfig(QuantizationConfigMixin):
    """`"quantization_config": {"quant_method": "subquad"}` in config.json."""

    dequantize = True  # once loaded, Hugging Face is to treat the model as an ordinary one

    def __init__(self, quant_method: str = NAME) -> None:
        self.quant_method = quant_method


class ConvertedModelQuantizer(HfQuantizer):
    """Installs the mechanisms of a converted model while it is loaded."""

    is_trainable = True

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        conversion = record.read(model.config)
        if conversion is None or not self.pre_quantized:
            raise InputError(
                "the quantization method subquad is for models saved by subquad; this one is not converted. Convert it with "
                "subquad.convert(model, method); load a converted model with subquad.load(folder)."
            )
        asked = model.config._attn_implementation
        if asked not in (NAME, SAVED_ATTENTION):
            raise InputError(
                f"the attention of a converted model is computed by its mechanisms; got attn_implementation={asked!r}. Leave "
                "it out; subquad.revert(model) restores the original attention."
            )
        if {site.name for site in sites(model)} != set(conversion.sites):
            raise InputError(
                f"the model was converted as a whole, and {type(model).__name__} does not have the same layers. Load it with "
                f"{' or '.join(map(str, model.config.architectures or ['the class that saved it']))}."
            )
        install(model, conversion)
        if checkpoint_files is None:
            raise InputError("a converted model is loaded from a folder; got a state_dict. Pass it to model.load_state_dict.")
        _require_mechanism_weights(model, checkpoint_files)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        record.require(model).write(model.config)  # transformers has removed its part of it
        weights.finish_loading(model)


def register() -> None:
    register_quantization_config(NAME)(ConvertedModelConfig)
    register_quantizer(NAME)(ConvertedModelQuantizer)


def _require_mechanism_weights(model: PreTrainedModel, files: Sequence[str]) -> None:
    """Refuse missing, unexpected or wrongly shaped weights of mechanisms: transformers may only warn about them."""
    state = model.state_dict()
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    saved = {
        rename_source_key(name, renamings, [], model.base_model_prefix, state)[0]: shape
        for file in files
        for name, shape in _shapes_in(file).items()
        if _is_of_mechanism(name)
    }
    expected = {name: weight.shape for name, weight in state.items() if _is_of_mechanism(name)}
    info = {
        "missing_keys": expected.keys() - saved.keys(),
        "unexpected_keys": saved.keys() - expected.keys(),
        "mismatched_keys": [(n, saved[n], expected[n]) for n in expected.keys() & saved.keys() if saved[n] != expected[n]],
    }
    weights.refuse(weights.mismatches(info), type(model).__name__, model.config.name_or_path, _ADVICE)


def _is_of_mechanism(name: str) -> bool:
    return f".{NAME}." in name


def _shapes_in(file: str) -> dict[str, torch.Size]:
    if not file.endswith(".safetensors"):
        raise InputError(f"a converted model is loaded only from safetensors; got {file}. {weight_files.ADVICE}")
    with safe_open(file, framework="pt") as opened:
        names = opened.keys()
        return {name: torch.Size(opened.get_slice(name).get_shape()) for name in names}
