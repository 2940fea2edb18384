"""A model and its tokenizer, from a folder or from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from subquad import models
from subquad.conversion import record
from subquad.errors import InputError, UnsupportedError
from subquad.models import loading

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def open_config(place: str, gguf: str | None = None) -> PreTrainedConfig:
    """What a folder or a hub name says of its model; refused where it is none."""
    _require_there(place, gguf)
    try:
        return AutoConfig.from_pretrained(place, **_gguf(gguf))
    except Exception as error:  # no network, no such name, no JSON, no model: whatever it is, the advice is the same
        here = "" if Path(place).expanduser().exists() else f"there is no folder {place} here, and as a name on the hub "
        raise InputError(f"{here}{place} does not hold a Hugging Face model: {_said(error)} {_ADVICE}") from error


def open_model(place: str, config: PreTrainedConfig, *, gguf: str | None = None, dtype: str = "float32") -> PreTrainedModel:
    """The model of the class that saved it, in evaluation."""
    if dtype not in DTYPES:
        raise InputError(f"dtype is one of {', '.join(DTYPES)}; got {dtype!r}.")
    kind = class_of(config, gguf)
    try:
        model, info = kind.from_pretrained(
            place, dtype=DTYPES[dtype], output_loading_info=True, **_gguf(gguf), **_unpacked(gguf)
        )
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the model in {place} does not load: {_said(error)}") from error
    missing = {"missing": loading.misfits(info)["missing"]}  # what is left over, such as another head, is no harm
    loading.refuse(
        missing, type(model).__name__, place, "Weights that are not there would begin at random. Get the model again."
    )
    return model.eval()


def open_tokenizer(place: str, gguf: str | None = None) -> Any:
    """The tokenizer beside a model; refused where none loads."""
    advice = "Text is read by the one that the model was trained with; save it there with tokenizer.save_pretrained."
    try:
        found = AutoTokenizer.from_pretrained(place, **_gguf(gguf))
    except Exception as error:  # each kind of tokenizer has errors of its own for files that are not there
        raise InputError(f"no tokenizer loads from {place}: {_said(error)} {advice}") from error
    files = {*found.vocab_files_names.values(), "tokenizer.json"} if found.vocab_files_names else set()
    folder = Path(place).expanduser()
    if files and gguf is None and folder.is_dir() and not any((folder / file).is_file() for file in files):
        raise InputError(f"{place} has no tokenizer: none of {', '.join(sorted(files))}. {advice}")
    return found


def require_convertible(place: str, config: PreTrainedConfig) -> None:
    """What can be refused before any weight is read."""
    if record.written(config) is not None:
        raise InputError(f"the model in {place} is converted already. Convert the one that it was made from.")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"the model in {place} is quantised, and new mechanisms are trained in its precision. Convert the model that it "
            "was made from, or one that was saved after model.dequantize()."
        )


def context_of(config: PreTrainedConfig) -> int | None:
    """Tokens that a model was made for; None where nothing limits them."""
    if isinstance(config, models.SubquadConfig) and config.position != "learned":
        return None
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


_ADVICE = "It is the name of a folder with config.json and weights, as save_pretrained writes them, or a name on the hub."


def _require_there(place: str, gguf: str | None) -> None:
    path = Path(place).expanduser()
    if path.is_dir():
        wanted = gguf or "config.json"
        if not (path / wanted).is_file():
            raise InputError(f"{place} does not hold a Hugging Face model: it has no {wanted}. {_ADVICE}")
    elif path.exists() or place.count("/") > 1 or place.startswith((".", "/", "~")):
        raise InputError(f"there is no folder {place}. {_ADVICE}")


def class_of(config: PreTrainedConfig, gguf: str | None = None) -> Any:
    """The class that a model was saved as; an Auto class where its config does not say."""
    for name in config.architectures or ():
        for module in (transformers, models):
            if (found := getattr(module, name, None)) is not None:
                return found
    return AutoModel if gguf is None else AutoModelForCausalLM


def _gguf(name: str | None) -> dict[str, str]:
    return {} if name is None else {"gguf_file": name}


def _unpacked(gguf: str | None) -> dict[str, Any]:
    """Weights that can be trained, where newer releases of transformers would keep them packed."""
    packing = getattr(transformers, "GgufConfig", None)
    return {} if gguf is None or packing is None else {"quantization_config": packing(dequantize=True)}


def _said(error: Exception) -> str:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return said if said.endswith(".") else f"{said}."
