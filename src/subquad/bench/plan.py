"""The plan of a comparison, and whether it can be carried out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from subquad import reference
from subquad.bench.measure import saved_inputs
from subquad.bench.results import BASELINE, LONGEST, Pass, Setting
from subquad.errors import InputError
from subquad.families.base import NEEDS, Mechanism
from subquad.registry import methods as all_methods
from subquad.registry import module_of, resolve


@dataclass(frozen=True)
class Plan:
    """What to measure, and how long it may take.

    Args:
        methods: names; the baseline is always measured.
        lengths: tokens.
        passes: "forward"; "training", forward and backward; "decode", one token after `length` others.
        budget: seconds.
        rounds: how often to measure each cell, if the budget allows.
        qkv: a file with the query, key and value of a model, on which errors are measured as well.
    """

    methods: tuple[str, ...]
    lengths: tuple[int, ...]
    passes: tuple[Pass, ...] = ("forward", "training", "decode")
    budget: float = 180.0
    rounds: int = 5
    qkv: Path | None = None


def default_methods() -> list[str]:
    """All methods but softmax, which is the baseline, and oracles, which are compared only when named."""
    return [name for name in all_methods() if name != "softmax" and not resolve(name).info.is_oracle]


def refusals_of(plan: Plan, setting: Setting) -> dict[str, str]:
    """The methods of the plan that cannot be compared, each with the reason."""
    need = "is_causal" if setting.is_causal else "bidirectional"
    refused = {}
    for method in plan.methods:
        mechanism = example(method)
        reasons = mechanism.reasons([need])
        if reasons:
            refused[method] = "; ".join(f"{NEEDS[n]}: {reason}" for n, reason in reasons.items())
        elif not reference.covers(mechanism):
            name = type(mechanism).__name__
            refused[method] = f"it has no reference to be checked against: set {name}.reference, see subquad.reference"
    return refused


def example(method: str) -> Mechanism:
    """The mechanism at a usual length, to ask what it supports."""
    return resolve(method).for_length(1024)


def check_plan(plan: Plan, setting: Setting) -> None:
    """Refuse a plan that cannot be carried out."""
    for method in plan.methods:
        if method != BASELINE:
            module_of(resolve(method))  # refuses those that a worker cannot import
    if not plan.methods or not plan.lengths or not plan.passes:
        raise InputError("a comparison needs at least one method, one length and one pass.")
    for length in plan.lengths:
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= LONGEST:
            raise InputError(f"a length must be an integer of tokens from 1 to {LONGEST:,}; got {length!r}.")
    if not plan.budget > 0:
        raise InputError(f"the budget must be above 0 minutes; got {plan.budget / 60:g}.")
    if plan.qkv is not None:
        saved_inputs(plan.qkv)
    if setting.dtype not in ("float32", "bfloat16", "float16", "float64"):
        raise InputError(f"dtype must be float32, bfloat16, float16 or float64; got {setting.dtype!r}.")
    try:
        torch.zeros(1, device=setting.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {setting.device!r} cannot be used here: {str(error).splitlines()[0]}") from error
