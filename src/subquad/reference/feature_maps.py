"""Learned feature maps: Hedgehog's [softmax(x W), softmax(-x W)], T2R's relu(x W + b), and elu(x) + 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.reference.linear import phi as linear
from subquad.reference.weighted import average


def attention(
    mechanism: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    allowed: Tensor,
    weights: Mapping[str, Tensor],
    scale: float | None,
    **_: Any,
) -> Tensor:
    fq, fk = (phi(mechanism.info.name, x, weights, side, scale) for x, side in ((query, "query"), (key, "key")))
    return average(fq @ fk.mT * allowed, value)


def phi(name: str, x: Tensor, weights: Mapping[str, Tensor], side: str, scale: float | None) -> Tensor:
    """The features of x (B, H, n, D); key-value heads of weights are repeated."""
    x = x if scale is None else x * scale**0.5
    if name == "linear":
        return linear(x)

    def each_head(weight: Tensor) -> Tensor:
        return weight.to(x.dtype).repeat_interleave(x.shape[1] // weight.shape[0], dim=0)

    x = x @ each_head(weights[f"{side}_weight"])
    if name == "t2r":
        return (x + each_head(weights[f"{side}_bias"]).unsqueeze(1)).clamp(min=0)
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1)
