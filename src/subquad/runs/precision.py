"""Mixed precision: products in bfloat16 under autocast; weights and sums keep their precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch

from subquad.errors import InputError

Precision = Literal["fp32", "bf16"]


def require_precision(precision: str) -> None:
    if precision not in get_args(Precision):
        raise InputError(f"precision must be {' or '.join(get_args(Precision))}; got {precision!r}.")


def mixed_precision(device: str, precision: Precision) -> AbstractContextManager[object]:
    """Autocast on that type of device for "bf16"; no change for "fp32"."""
    return torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext()
