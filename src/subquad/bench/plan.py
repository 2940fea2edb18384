"""What a comparison is to measure, and whether that is possible."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from subquad.bench.measure import saved_inputs
from subquad.bench.results import BASELINE, Pass, Setting
from subquad.errors import InputError
from subquad.families.base import NEEDS, Mechanism
from subquad.registry import methods as all_methods
from subquad.registry import resolve

LONGEST = 2**24  # tokens


@dataclass(frozen=True)
class Plan:
    """What to measure, and how long it may take.

    Args:
        methods: names; the baseline comes by itself.
        lengths: tokens.
        passes: forward; training, that is forward and backward; decode, one token after so many others.
        budget: seconds.
        rounds: how often each cell is measured, if the budget allows.
        qkv: a file with the query, key and value of a model, on which errors are measured too.
    """

    methods: tuple[str, ...]
    lengths: tuple[int, ...]
    passes: tuple[Pass, ...] = ("forward", "training", "decode")
    budget: float = 180.0
    rounds: int = 5
    qkv: Path | None = None


def default_methods() -> list[str]:
    """All but the baseline itself and oracles, which are compared only when named."""
    return [name for name in all_methods() if name != "softmax" and not resolve(name).info.is_oracle]


def refusals_of(plan: Plan, setting: Setting) -> dict[str, str]:
    """Methods that have no meaning for the direction asked for, with the reason."""
    need = "is_causal" if setting.is_causal else "bidirectional"
    refused = {}
    for method in plan.methods:
        reasons = sample(method).reasons([need])
        if reasons:
            refused[method] = "; ".join(f"{NEEDS[n]}: {reason}" for n, reason in reasons.items())
    return refused


def sample(method: str) -> Mechanism:
    return resolve(method).for_length(1024)


def check(plan: Plan, setting: Setting) -> None:
    for method in plan.methods:
        if method != BASELINE:
            resolve(method)
    if not plan.methods or not plan.lengths or not plan.passes:
        raise InputError("a comparison needs at least one method, one length and one pass.")
    for length in plan.lengths:
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= LONGEST:
            raise InputError(f"a length is a whole number of tokens from 1 to {LONGEST:,}; got {length!r}.")
    if not plan.budget > 0:
        raise InputError(f"the budget is a time above 0; got {plan.budget / 60:g} minutes.")
    if plan.qkv is not None:
        saved_inputs(plan.qkv)
    if setting.dtype not in ("float32", "bfloat16", "float16", "float64"):
        raise InputError(f"dtype is float32, bfloat16, float16 or float64; got {setting.dtype!r}.")
    try:
        torch.zeros(1, device=setting.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {setting.device!r} cannot be used here: {str(error).splitlines()[0]}") from error
