"""The reference beside a call: its results in any precision, and what the rule must know about the call."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from subquad import reference
from tests.soak import choices, sums
from tests.soak.calls import Prepared, cleaned, taken
from tests.soak.judging import EDGE, MARGIN, RandomRounding, Results

UNITS = 2.0  # compiled code takes other steps than the reference: sums in parts, a product for a division, its own exponential
FUSED_UNITS = 20.0  # the exponential of PyTorch's fused attention in float32 is right to 20 units in the last place (`exp_u20`)


def is_fused(prepared: Prepared) -> bool:
    """Whether PyTorch's fused attention takes part."""
    engine, spec = prepared.mechanism.info.engine, prepared.spec
    options = prepared.mechanism
    has_global_rows = spec.has_global_mask or getattr(options, "num_global", 0) or getattr(options, "globals", 0)
    return engine in ("dense", "low_rank") or (
        engine in ("block_sparse", "bucketed") and (spec.pieces is not None or has_global_rows or not spec.is_native)
    )


class Evaluation:
    """The reference on the same numbers, with zeros in pads, in a precision of choice."""

    def __init__(self, prepared: Prepared, names: list[str], value: Tensor | None = None) -> None:
        self.prepared, self.names, self.value = prepared, names, value
        is_half = prepared.dtype.itemsize < 4
        # A choice is made in the precision of the sums, so that is where the reference must make it, too.
        self.precision = torch.float32 if is_half and prepared.spec.mechanism in choices.CHOOSING else prepared.dtype
        self.units = FUSED_UNITS if self.precision == torch.float32 and is_fused(prepared) else UNITS

    def __call__(self, dtype: torch.dtype, seed: int | None = None, without_nan: bool = False) -> Results:
        p = self.prepared
        tensors = {"q": p.q, "k": p.k, "v": p.v if self.value is None else self.value, "hidden": p.hidden}
        if p.has_dirty_queries:
            tensors["q"] = p.q.masked_fill(~p.real[:, None, :, None], 0)
        if without_nan:
            tensors["q"] = p.q.nan_to_num(0.0)
        tensors = {name: None if x is None else x.detach().to(dtype, copy=True) for name, x in tensors.items()}
        if p.is_shared:
            tensors["q"] = tensors["k"]
        weights = {n: w.detach().to(dtype) if w.is_floating_point() else w for n, w in p.weights().items()}
        wrt = {name: tensors[name].requires_grad_() for name in self.names}
        if "weights" in p.spec.grad:
            wrt |= {name: weights[name].requires_grad_() for name, _ in p.module.named_parameters()}
        options = {n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in p.options.items()}
        options.pop("dropout_p", None)
        with RandomRounding(seed, self.units) if seed is not None else contextlib.nullcontext():
            by_sums = seed is not None and seed % 4 == 3 and sums.cancels(p.mechanism)
            out = (sums if by_sums else reference).attention(
                p.mechanism, tensors["q"], tensors["k"], tensors["v"], weights=weights, hidden=tensors["hidden"], **options
            )
            grads = taken(out, wrt, p.target.to(dtype))
        found = {"out": cleaned(p, out), **grads}
        # The result is rounded to the precision of the call, whatever it was computed in.
        return {name: x if dtype == torch.float64 else x.to(p.dtype) for name, x in found.items()}


def undecided(prepared: Prepared, found: Results) -> Results:
    """By result, the rows that depend on a choice within rounding."""
    p = prepared
    scale = p.options.get("scale")
    q, k = p.q.detach().double(), p.k.detach().double()
    if p.real is not None:
        k = k.masked_fill(~p.real[:, None, :, None], 0)
        q = q.masked_fill(~p.real[:, None, :, None], 0) if q.shape[2] == k.shape[2] else q
    eps = torch.finfo(torch.promote_types(p.dtype, torch.float32)).eps
    close = choices.undecided(p.mechanism, q, k if scale is None else k * scale, p.real, p.weights(), eps)  # (B, H)
    grouped = close.unflatten(1, (p.spec.kv_heads, -1)).any(2)  # (B, K)
    rows = {"out": close, "q": close, "k": close if p.is_shared else grouped, "v": grouped}
    return {
        name: (rows[name].unsqueeze(-1) if name in rows else close.any()).expand(x.shape[:-1] if x.dim() else (1,)[:0])
        for name, x in found.items()
    }


def size_of(x: Tensor, real: Tensor | None) -> float:
    """The largest number of real tokens."""
    if real is not None and x.shape[2] == real.shape[1]:
        x = x.masked_fill(~real[:, None, :, None], 0)
    return float(x.detach().double().nan_to_num(0.0).abs().amax()) if x.numel() else 0.0


def decided_by_rounding(prepared: Prepared) -> bool:
    """Whether scores may be so large that their rounding error exceeds 1, so that it decides which keys have any weight."""
    p = prepared
    scale = p.options.get("scale")
    factor = p.spec.dim * (p.spec.dim**-0.5 if scale is None else abs(scale))
    return size_of(p.q, p.real) * size_of(p.k, p.real) * factor * torch.finfo(p.dtype).eps > 1


def leaves_range_in_sums(prepared: Prepared) -> bool:
    """Whether sum_j phi(k_j) v_j^T, which the mechanism computes first, is out of the range, though the output may not be."""
    p = prepared
    if p.mechanism.info.engine != "kernelized" or p.dtype == torch.float64:
        return False
    product = size_of(p.k, p.real) * size_of(p.v, p.real)
    underflows = p.spec.mechanism == "plain" and product < MARGIN * torch.finfo(torch.float32).tiny  # where phi(k) = k
    return underflows or product * p.spec.keys > EDGE


def negligible(prepared: Prepared) -> dict[str, float]:
    """What is zero but for rounding, for the gradients in which terms cancel: those of the size of dO v, times the other side."""
    p = prepared
    eps = torch.finfo(torch.promote_types(p.dtype, torch.float32)).eps
    q, k, v, dO = (size_of(x, p.real) for x in (p.q, p.k, p.v, p.target))
    terms = 8 * eps * dO * v * p.spec.value_dim
    sizes = {"q": max(1.0, k), "k": max(1.0, q, k if p.is_shared else 0.0)}
    others = {name: max(1.0, q, k) * p.spec.queries for name, _ in p.module.named_parameters()}
    rows = {"out": 64 * eps * v} if p.spec.mechanism == "svd" else {}  # a row of the approximation may cancel, too
    return rows | {name: terms * size for name, size in {**sizes, **others, "hidden": p.spec.queries}.items()}
