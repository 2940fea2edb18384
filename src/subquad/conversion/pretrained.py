"""Models and tokenizers from a folder or from the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from subquad import models
from subquad.errors import InputError, SubquadError, UnsupportedError, first_line
from subquad.models import weight_files, weights
from subquad.models.converted import record

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# The arguments of `from_pretrained` that say where to find a config on the hub.
_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Load a converted model or a subquad model, with the class that saved it.

    Args:
        path: a folder written by `save_pretrained`, or a name on the Hugging Face hub.
        kwargs: arguments of `from_pretrained`, such as dtype or device_map.

    Raises:
        SubquadError: the model is neither converted nor a subquad model, or weights are missing, unexpected or of the wrong
            shape.
    """
    place = os.path.expanduser(os.fspath(path))
    config = load_config(place, **{name: kwargs[name] for name in _HUB if name in kwargs})
    conversion = record.read(config)
    if conversion is None and not isinstance(config, models.SubquadConfig):
        raise InputError(
            f"subquad.load loads converted models and subquad models; got {place}, a {config.model_type} model. Load it with "
            "transformers: AutoModel.from_pretrained."
        )
    model_class = _saved_class(config)
    if model_class is None:
        raise InputError(
            f"{place} was saved by {' or '.join(architectures(config)) or 'an unknown class'}, which is neither in "
            "transformers nor in subquad.models. Load it with that class: from_pretrained."
        )
    if conversion is None:
        with weight_files.loading(place, kwargs.get("subfolder")):
            return model_class.from_pretrained(place, **weight_files.safe_arguments(kwargs))
    conversion.write(config)  # what folders of version 1 lack
    config._attn_implementation = kwargs.pop("attn_implementation", None) or record.NAME
    if kwargs.pop("ignore_mismatched_sizes", False):
        raise InputError(
            "subquad.load loads every weight as it was saved; got ignore_mismatched_sizes=True. Use from_pretrained instead: "
            f"{model_class.__name__}.from_pretrained."
        )
    wants_info = kwargs.pop("output_loading_info", False)
    given = {**weight_files.safe_arguments(kwargs), "output_loading_info": True, "ignore_mismatched_sizes": True}
    with weight_files.loading(place, kwargs.get("subfolder")):
        model, info = model_class.from_pretrained(place, config=config, **given)
    advice = "Load it from all of its files; or convert the original model again."
    weights.refuse(weights.mismatches(info), model_class.__name__, place, advice)
    return (model, info) if wants_info else model


def load_config(place: str, gguf: str | None = None, **kwargs: Any) -> PreTrainedConfig:
    """The config of the model in a folder or of a hub name; an error if there is none."""
    _require_exists(place, gguf)
    try:
        found = AutoConfig.from_pretrained(place, trust_remote_code=False, **_gguf(gguf), **kwargs)
    except SubquadError:
        raise
    except Exception as error:  # no network, no such name, no JSON, no model: the advice is always the same
        here = "" if Path(place).expanduser().exists() else f"there is no folder {place}, and as a name on the hub "
        raise InputError(f"{here}{place} does not hold a Hugging Face model: {first_line(error)} {_ADVICE}") from error
    _require_no_code(place, found)
    return found


def _require_no_code(place: str, config: PreTrainedConfig) -> None:
    """Refuse what transformers would run, or load as a pickle, because the config says so."""
    if "/" in str(config._attn_implementation):
        raise InputError(
            f"{place} asks for an attention kernel from the hub, {config._attn_implementation!r}; subquad runs no code of a "
            "model. Remove attn_implementation from its config.json."
        )
    weights = getattr(config, "transformers_weights", None)
    if weights is not None and not str(weights).endswith((".safetensors", ".safetensors.index.json")):
        raise InputError(f"transformers_weights in {place} must be a safetensors file; got {weights!r}. {weight_files.ADVICE}")


def load_model(place: str, config: PreTrainedConfig, *, gguf: str | None = None, dtype: str = "float32") -> PreTrainedModel:
    """Any model, with the class that saved it, in evaluation mode."""
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    if record.read(config) is not None:
        return _loaded(place, lambda: load(place, dtype=DTYPES[dtype])).eval()
    model_class = class_of(config, gguf)
    given: dict[str, Any] = {"dtype": DTYPES[dtype], "output_loading_info": True, **_gguf(gguf), **_unpacked(gguf)}
    given = given if gguf else weight_files.safe_arguments(given)
    model, info = _loaded(place, lambda: model_class.from_pretrained(place, trust_remote_code=False, **given))
    missing = {"missing": weights.mismatches(info)["missing"]}  # unexpected weights, such as another head, do no harm
    weights.refuse(missing, type(model).__name__, place, "Missing weights would be random. Get a new copy of the model.")
    return model.eval()


def load_tokenizer(place: str, gguf: str | None = None) -> Any:
    """The tokenizer beside a model; an error if there is none."""
    advice = "Save the tokenizer that the model was trained with beside it: tokenizer.save_pretrained."
    try:
        found = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **_gguf(gguf))
    except Exception as error:  # each kind of tokenizer has its own errors for missing files
        raise InputError(f"no tokenizer can be loaded from {place}: {first_line(error)} {advice}") from error
    if not isinstance(found.model_max_length, (int, float)):
        raise InputError(f"model_max_length in {place} must be a number; got {found.model_max_length!r}. {advice}")
    files = {*found.vocab_files_names.values(), "tokenizer.json"} if found.vocab_files_names else set()
    folder = Path(place).expanduser()
    if files and gguf is None and folder.is_dir() and not any((folder / file).is_file() for file in files):
        raise InputError(f"{place} has no tokenizer: none of {', '.join(sorted(files))}. {advice}")
    return found


def require_convertible(place: str, config: PreTrainedConfig) -> None:
    """Refuse what can be refused before weights are loaded."""
    if record.read(config) is not None:
        raise InputError(f"the model in {place} is converted already. Convert the original model.")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"the model in {place} is quantized, and mechanisms are trained in the precision of the model. Convert the "
            "original model, or one that was saved after model.dequantize()."
        )


def context_of(config: PreTrainedConfig) -> int | None:
    """The length that a model was trained for; None for no limit."""
    if isinstance(config, models.SubquadConfig) and config.position != "learned":
        return None
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def class_of(config: PreTrainedConfig, gguf: str | None = None) -> Any:
    """The class that saved a model, or an Auto class if it is not known."""
    return _saved_class(config) or (AutoModel if gguf is None else AutoModelForCausalLM)


def architectures(config: PreTrainedConfig) -> list[str]:
    """The names of the classes that a model was saved from, as far as its config says so."""
    found = config.architectures
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _saved_class(config: PreTrainedConfig) -> Any:
    for name in architectures(config):
        for module in (transformers, models):
            found = getattr(module, name, None)
            if isinstance(found, type) and issubclass(found, PreTrainedModel):
                return found
    return None


_ADVICE = "Pass a folder with config.json and weights, as save_pretrained writes them, or a name on the hub."


def _require_exists(place: str, gguf: str | None) -> None:
    path = Path(place).expanduser()
    if path.is_dir():
        wanted = gguf or "config.json"
        if not (path / wanted).is_file():
            raise InputError(f"{place} does not hold a Hugging Face model: it has no {wanted}. {_ADVICE}")
    elif path.exists() or place.count("/") > 1 or place.startswith((".", "/", "~")):
        raise InputError(f"there is no folder {place}. {_ADVICE}")


def _loaded(place: str, load: Callable[[], Any]) -> Any:
    try:
        with weight_files.loading(os.path.expanduser(place)):
            return load()
    except SubquadError:
        raise
    except Exception as error:
        raise InputError(f"the model in {place} cannot be loaded: {first_line(error)}") from error


def _gguf(name: str | None) -> dict[str, str]:
    return {} if name is None else {"gguf_file": name}


def _unpacked(gguf: str | None) -> dict[str, Any]:
    """Unpack weights so that they can be trained; newer releases of transformers would keep them packed."""
    packing = getattr(transformers, "GgufConfig", None)
    return {} if gguf is None or packing is None else {"quantization_config": packing(dequantize=True)}
