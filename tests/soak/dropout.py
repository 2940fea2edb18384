"""Dropout, checked weight by weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.soak.calls import Prepared, cleaned, equal
from tests.soak.evaluation import Evaluation
from tests.soak.judging import Results


def dropped(prepared: Prepared) -> tuple[Results, Any, str]:
    """The weights, the rule that they must obey, and what else is wrong.

    With the identity matrix as values, the output is the weights: each must be 0, or the true weight divided by 1 - p.
    """
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
    fault = "" if equal(found, weights()) else "the same seed does not drop the same weights"
    truth = plain(torch.float64)["out"]
    # Where scores are so large that rounding decides, a weight may be 0 without being dropped.
    rounded = (plain(plain.precision, seed)["out"] for seed in (None, *range(8)))
    real = (truth > 1e-3) & torch.stack([x > 1e-3 for x in rounded]).all(0)
    count, expected = int((is_dropped & real).sum()), float(real.sum()) * p
    if abs(count - expected) > 7 * (expected * (1 - p)) ** 0.5 + 1:
        fault = f"{count} of {int(real.sum())} weights are dropped; expected about {expected:.0f}"
    return {"out": found}, evaluate, fault
