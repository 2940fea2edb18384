"""Checks and finishing touches after Hugging Face has loaded weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from subquad.attention import MechanismModule
from subquad.errors import InputError

_LISTED = 8  # names in a message, at most


def mismatches(info: dict[str, Any]) -> dict[str, Iterable[str]]:
    """The weights that do not fit, by kind, from the loading info of `from_pretrained`."""
    return {
        "missing": info["missing_keys"],
        "unexpected": info["unexpected_keys"],
        "of another shape": [_mismatch(*key) for key in info["mismatched_keys"]],
    }


def refuse(mismatches: dict[str, Iterable[str]], model: str, path: object, advice: str) -> None:
    """Raise an error that lists the mismatches, if there are any."""
    lines = "".join(f"\n  - {kind}: {_some(sorted(names))}" for kind, names in mismatches.items() if names)
    if lines:
        raise InputError(f"the weights in {path} do not fit {model} with this config:{lines}\n{advice}")


def finish_loading(model: PreTrainedModel) -> None:
    """Make a loaded model compute the same bits as when it was saved."""
    for module in model.modules():
        if isinstance(module, MechanismModule):
            module.take_seed()
    for weight in (*model.parameters(), *model.buffers()):
        weight.data = weight.data.clone()  # a tensor mapped from a file may be unaligned, and kernels then round differently


def _mismatch(name: str, saved: torch.Size, expected: torch.Size) -> str:
    return f"{name} {tuple(saved)} instead of {tuple(expected)}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
