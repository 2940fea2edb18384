"""Files of tensors: safetensors, and what `torch.save` writes. None can run code: pickles are read with `weights_only`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from subquad.errors import InputError, first_line

_NOT_TENSORS = "it is damaged, or holds more than tensors and plain values; other objects could run code, and are not loaded."


def read_tensors(path: Path, what: str = "saved tensors (.pt, .safetensors)", advice: str = "Save them again.") -> Any:
    """Tensors and plain values, usually by name, on the CPU; `what` they are and the `advice` are for the error message."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # each reader has its own errors for a file of another kind
        why = _NOT_TENSORS if isinstance(error, pickle.UnpicklingError) else first_line(error)
        raise InputError(f"{path} cannot be read as {what}: {why} {advice}") from error
