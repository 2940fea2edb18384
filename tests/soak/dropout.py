"""Dropout, checked weight by weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.soak.calls import Prepared, cleaned, equal
from tests.soak.evaluation import Evaluation
from tests.soak.judging import Results


def dropped(prepared: Prepared) -> tuple[Results, Any, str]:
    """With the identity as values the output is the weights: each must be dropped, or be divided by 1 - p."""
    p, keys = prepared.spec.dropout_p, prepared.spec.keys
    value = torch.eye(keys, dtype=prepared.dtype).expand(*prepared.v.shape[:2], -1, -1)

    def weights() -> Tensor:
        torch.manual_seed(prepared.spec.tensor_seed)
        return cleaned(prepared, prepared.call(prepared.q, prepared.k, value, prepared.hidden, **prepared.options))

    found = weights()
    is_dropped = found == 0
    plain = Evaluation(prepared, [], value)

    def evaluate(dtype: torch.dtype, seed: int | None = None) -> Results:
        return {"out": torch.where(is_dropped, 0, plain(dtype, seed)["out"] / (1 - p))}

    evaluate.precision = plain.precision
    fault = "" if equal(found, weights()) else "the same seed drops other weights"
    truth = plain(torch.float64)["out"]
    real = truth > 1e-3
    count, expected = int((is_dropped & real).sum()), float(real.sum()) * p
    if abs(count - expected) > 7 * (expected * (1 - p)) ** 0.5 + 1:
        fault = f"{count} weights of {int(real.sum())} are dropped; expected about {expected:.0f}"
    return {"out": found}, evaluate, fault
