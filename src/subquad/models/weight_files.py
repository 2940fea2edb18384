"""The files of a model's weights: only safetensors, because loading a pickle could run code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from subquad.errors import InputError, SubquadError, first_line
from subquad.runs import typed_json
from subquad.runs.typed_json import MisfitError

_INDEXES = "*.safetensors.index*.json"  # of weights in several files
_ADAPTER = "adapter_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
ADVICE = "If you trust the model, load it with transformers and save it as safetensors: model.save_pretrained(folder)."


def safe_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained`, so that it loads only safetensors."""
    for name in ("use_safetensors", "weights_only"):
        if arguments.get(name) is False:
            raise InputError(f"subquad loads weights only from safetensors; got {name}=False. Omit it. {ADVICE}")
    return {**arguments, "use_safetensors": True}


@contextlib.contextmanager
def loading(place: str | os.PathLike[str] | None, subfolder: str | None = None) -> Iterator[None]:
    """A block that loads the model in `place`: whatever is wrong with its files becomes one error that names the file.

    If `place` is a name on the hub, the errors of Hugging Face pass through: they say more.
    """
    folder = None if place is None else Path(place) / (subfolder or "")
    if folder is None or not folder.is_dir():
        yield
        return
    if (folder / _ADAPTER).exists():
        raise InputError(
            f"{folder} has an adapter, {_ADAPTER}, which is for another model. Load that model with peft, merge the adapter "
            "with model.merge_and_unload(), and save the result."
        )
    for index in folder.glob(_INDEXES):
        _require_safetensors(index)
    try:
        yield
    except SubquadError:
        raise
    except Exception as error:  # from safetensors, PyTorch or transformers: a file can be wrong in many ways
        raise InputError(_why(folder, error)) from error


def _require_safetensors(index: Path) -> None:
    """Refuse an index that names anything but safetensors files beside it."""
    try:
        saved = typed_json.load(index)
        names = typed_json.parse(dict[str, str], saved.get("weight_map") if isinstance(saved, dict) else None, "weight_map")
    except (OSError, MisfitError) as error:
        raise InputError(f"{index} cannot be read: {error}. Get a new copy of the model.") from error
    for name in names.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{index} must name only safetensors files beside it; got {name!r}. {ADVICE}")


def _why(folder: Path, error: Exception) -> str:
    weights = sorted(folder.glob("*.safetensors"))
    for path in weights:
        if damage := _damage(path):
            return f"{path} is not a valid safetensors file: {damage}. Get a new copy."
    pickles = sorted(path for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles and not weights:
        return f"{pickles[0]} could run code when it is loaded; subquad loads only safetensors. {ADVICE}"
    return f"the model in {folder} cannot be loaded: {first_line(error)}"


def _damage(path: Path) -> str:
    try:
        with safe_open(path, framework="pt") as opened:
            opened.keys()
    except Exception as error:
        return first_line(error).removesuffix(".")
    return ""
