"""After weights were loaded: nothing may be missing or left over, and the model is as it was when it was saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from subquad.attention import MechanismModule
from subquad.errors import InputError


def misfits(info: dict[str, Any]) -> dict[str, Iterable[str]]:
    """What a loading report says of weights that do not fit, by kind."""
    return {
        "missing": info["missing_keys"],
        "surplus": info["unexpected_keys"],
        "of another shape": [_mismatch(*key) for key in info["mismatched_keys"]],
    }


def refuse(misfits: dict[str, Iterable[str]], model: str, path: object, advice: str) -> None:
    """If there are any."""
    lines = "".join(f"\n  - {kind}: {_some(sorted(names))}" for kind, names in misfits.items() if names)
    if lines:
        raise InputError(f"the weights in {path} are not those of {model} with this config:{lines}\n{advice}")


def settle(model: PreTrainedModel) -> None:
    """Take the draws that were loaded, and weights to where kernels compute as they did before saving."""
    for module in model.modules():
        if isinstance(module, MechanismModule):
            module.take_seed()
    for weight in (*model.parameters(), *model.buffers()):
        weight.data = weight.data.clone()  # kernels round differently where a file has left a tensor unaligned


def _mismatch(name: str, saved: torch.Size, expected: torch.Size) -> str:
    return f"{name} {tuple(saved)} instead of {tuple(expected)}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
