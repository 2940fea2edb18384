"""Files of tensors: safetensors, and what `torch.save` writes. None can run code: pickles are read with `weights_only`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from subquad.errors import InputError

_NOT_TENSORS = "it is damaged, or it holds more than tensors and plain values; other objects could run code, and are not loaded"


def read_tensors(path: Path) -> Any:
    """Tensors and plain values, usually by name, on the CPU."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # each reader has its own errors for a file of another kind
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        why = _NOT_TENSORS if isinstance(error, pickle.UnpicklingError) else said
        raise InputError(f"{path} cannot be read as saved tensors (.pt, .safetensors): {why}") from error
