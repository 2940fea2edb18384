"""The files of a model's weights: safetensors alone, because a pickle could run code when it is loaded."""

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
ADVICE = "Save the model as safetensors where you trust it: load it with transformers, and call model.save_pretrained(folder)."


def safe_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained`, so that it loads safetensors alone."""
    for name in ("use_safetensors", "weights_only"):
        if arguments.get(name) is False:
            raise InputError(f"subquad loads weights from safetensors alone; got {name}=False. Leave it out. {ADVICE}")
    return {**arguments, "use_safetensors": True}


@contextlib.contextmanager
def loading(place: str | os.PathLike[str] | None, subfolder: str | None = None) -> Iterator[None]:
    """A block that loads the model in `place`: what is wrong with its files becomes one error, which names the file.

    A name on the hub is no folder: the errors of Hugging Face say more about it.
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
    except Exception as error:  # of safetensors, PyTorch, transformers: a file can be wrong in many ways
        raise InputError(_why(folder, error)) from error


def _require_safetensors(index: Path) -> None:
    """Refuse an index that names other files than safetensors beside it."""
    try:
        saved = typed_json.load(index)
        names = typed_json.parse(dict[str, str], saved.get("weight_map") if isinstance(saved, dict) else None, "weight_map")
    except (OSError, MisfitError) as error:
        raise InputError(f"{index} cannot be read: {error}. Get the model again.") from error
    for name in names.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{index} must name safetensors files beside it; got {name!r}. {ADVICE}")


def _why(folder: Path, error: Exception) -> str:
    weights = sorted(folder.glob("*.safetensors"))
    for path in weights:
        if damage := _damage(path):
            return f"{path} is not a whole safetensors file: {damage}. Get it again."
    pickles = sorted(path for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles and not weights:
        return f"{pickles[0]} could run code when it is loaded, and subquad loads safetensors alone. {ADVICE}"
    return f"the model in {folder} cannot be loaded: {first_line(error)}"


def _damage(path: Path) -> str:
    try:
        with safe_open(path, framework="pt") as opened:
            opened.keys()
    except Exception as error:
        return first_line(error).removesuffix(".")
    return ""
