"""The relative-error rule: an error of at most twice that of the plain reference in the same precision, against float64.

It is the rule of the contract (`subquad.testing.contract.precision`; in float64, of `assert_close`), applied to every row of the output
and of every gradient by itself, so that a large row cannot hide a small one. A row has only a few numbers, so on a single row the
reference may be accurate by luck. A row that breaks the rule is therefore judged again, by the largest error of several evaluations
of the reference in the same precision, each operation of which is rounded at random (`RandomRounding`): that is how far rounding
alone takes this row.

A row is beyond the range of its precision, and is not judged, where the reference itself overflows; nor is the gradient of a weight,
if any row of the output is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subquad.testing import ROUNDING

FACTOR = 2.0
SAMPLES = 48  # of random rounding, before a row is at fault; most need one

MARGIN = 64  # by which the same operations in another order may overflow or underflow earlier
EDGE = torch.finfo(torch.float32).max / MARGIN

# In float64, what is so much smaller than the largest number of a result may depend on where exponentials underflow in the reference.
VANISHING = 1e-60

# What rounds; all other operations choose, move or compare numbers.
ROUNDED = {
    *("add", "sub", "rsub", "mul", "div", "reciprocal", "pow", "square", "sqrt", "rsqrt", "addcmul", "addcdiv"),
    *("exp", "log", "sin", "cos", "sigmoid", "sigmoid_backward", "_softmax", "_softmax_backward_data"),
    *("mm", "bmm", "mv", "dot", "sum", "mean", "cumsum", "linalg_vector_norm", "norm"),
}


class RandomRounding(TorchDispatchMode):
    """Changes the result of every operation by up to `units` in its last place: for sums, of the sum of the magnitudes.

    The change is a hash. With even seeds it is one of the number, so that equal numbers are rounded alike, as one program does it, and
    their errors add up; with odd seeds one of its place, since another program may compute equal numbers in different ways. With odd
    seeds what is about to underflow is 0, too: the compiled kernels have no denormal numbers.
    """

    def __init__(self, seed: int, units: float) -> None:
        super().__init__()
        self.seed, self.units, self.operations = seed, units, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("_linalg_svd", "linalg_svd"):
            x = args[0]
            return func(self._rounded(x, x.double().abs().amax((-2, -1), keepdim=True)), *args[1:], **kwargs)
        out = func(*args, **kwargs)
        if name.rstrip("_") not in ROUNDED or not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        rounded = self._rounded(out, self._spread(name, out, args))
        return out.copy_(rounded) if name.endswith("_") else rounded

    def _rounded(self, x: Tensor, spread: Tensor) -> Tensor:
        exact = x.double()
        self.operations += 1
        key = self.seed * 1000003 + self.operations
        noise = hashed(
            exact.contiguous().view(torch.int64) if self.seed % 2 == 0 else torch.arange(x.numel()).view(x.shape), key
        )
        rounded = (exact + noise * self.units * torch.finfo(x.dtype).eps * spread).to(x.dtype)
        if self.seed % 2 and x.dtype.itemsize >= 4:
            rounded = torch.where(rounded.abs() < MARGIN * torch.finfo(x.dtype).tiny, 0.0, rounded)
        if x.dtype not in (torch.float32, torch.bfloat16):
            return rounded
        return torch.where(spread > EDGE, torch.inf, rounded)

    def _spread(self, name: str, out: Tensor, args: tuple[Any, ...]) -> Tensor:
        """What the error of an operation is relative to."""
        if name in ("mm", "bmm", "mv", "dot"):
            return terms(args[0].shape[-1]) * (args[0].double().abs() @ args[1].double().abs())
        if name == "sum":
            return terms(args[0].numel() // max(out.numel(), 1)) * args[0].double().abs().sum(*args[1:]).reshape(out.shape)
        if name == "_softmax_backward_data":
            grad, weight = args[0].double().abs(), args[1].double()  # w (g - sum w g), which may cancel
            return 2 * weight * grad.amax(args[2], keepdim=True) if grad.numel() else grad
        return out.double().abs()


def terms(count: int) -> float:
    """How much more than one rounding a sum of so many terms has: half their square root."""
    return max(1.0, count**0.5 / 2)


def hashed(numbers: Tensor, key: int) -> Tensor:
    """From -1 to 1 for each of the integers."""
    numbers = (numbers ^ (key * 0x9E3779B1)) * -0x61C8864680B583EB
    numbers = (numbers ^ (numbers >> 32)) * -0x40A7B892E31B1A47
    return (numbers >> 33).double() / 2**30


Results = dict[str, Tensor]  # "out" and the gradients by name
OF_TOKENS = ("out", "q", "k", "v", "hidden")  # the others are gradients of weights, and sums over all rows


@dataclass
class Judgement:
    """What is wrong with a result: one line for each tensor; and how many rows were judged, or were beyond the range."""

    faults: list[str] = field(default_factory=list)
    check: str = ""
    rows: int = 0
    beyond: int = 0
    flips: int = 0

    def add(self, name: str, fault: str, check: str = "") -> None:
        self.faults.append(f"{name}: {fault}")
        self.check = self.check or check or ("forward" if name == "out" else "gradients")


def judge(
    found: Results,
    evaluate: Callable[..., Results],
    precision: torch.dtype,
    undecided: Callable[[], Mapping[str, Tensor]] | None = None,
    without_nan: Results | None = None,
    negligible: Mapping[str, float] | None = None,
) -> Judgement:
    """Compare with `evaluate(dtype)`, the reference in that precision, and `evaluate(dtype, seed)`, the same rounded at random.

    `undecided()` has, for each result, the rows that depend on a choice which rounding may turn (see `tests.soak.choices`).
    `negligible` is, by result, what is zero but for rounding: a row that is expected to be smaller must only be smaller.
    `without_nan` are the results without the NaN in a query: rows that are finite there, and NaN with it, must not be finite.
    """
    truth = evaluate(torch.float64)
    plain = truth if precision == torch.float64 else evaluate(precision)
    tiny = 1000 * torch.finfo(precision).smallest_normal  # weights below the smallest may be flushed to zero
    judgement, suspects = Judgement(), {}
    for name, ours in found.items():
        right, usual = as_rows(truth[name]), as_rows(plain[name])
        if ours.shape != truth[name].shape:
            judgement.add(name, f"shape {tuple(ours.shape)}, expected {tuple(truth[name].shape)}")
            continue
        ours = as_rows(ours)
        judged = right.isfinite().all(-1) & usual.isfinite().all(-1)
        if name not in OF_TOKENS and not all(x["out"].isfinite().all() for x in (truth, plain)):
            judged = torch.zeros_like(judged)
        judgement.rows += judged.numel()
        judgement.beyond += int((~judged).sum())
        error = largest(ours - right)
        allowed = ROUNDING * largest(right) if precision == torch.float64 else FACTOR * largest(usual - right)
        if precision == torch.float64 and right.numel():
            allowed = allowed.clamp(min=VANISHING * float(right.abs().nan_to_num(0.0, 0.0).amax()))
        broken = judged & ~(error <= allowed.clamp(min=tiny))
        if negligible is not None and name in negligible:
            broken &= ~((largest(right) < negligible[name]) & (error < negligible[name]))
        if without_nan is not None and name == "out":
            hidden = right.isnan().any(-1) & as_rows(without_nan[name]).isfinite().all(-1) & ours.isfinite().all(-1)
            if hidden.any():
                judgement.add(name, f"NaN is hidden in {int(hidden.sum())} rows, first {first(hidden)}", "NaN")
        if broken.any():
            suspects[name] = (broken, error, largest(usual - right))
    if suspects:
        _judge_again(judgement, truth, evaluate, precision, suspects, undecided)
    return judgement


def holds_as_a_whole(found: Results, evaluate: Callable[..., Results], precision: torch.dtype) -> bool:
    """Whether the largest error of each result is at most twice that of the plain reference, as in the contract itself."""
    truth, plain = evaluate(torch.float64), evaluate(precision)
    return all(
        float((x.double() - truth[name]).abs().amax()) <= FACTOR * float((plain[name].double() - truth[name]).abs().amax())
        for name, x in found.items()
        if x.numel()
    )


def _judge_again(judgement, truth, evaluate, precision, suspects, undecided) -> None:
    """Take out of `suspects` what a choice within rounding explains, and what random rounding does; the rest is at fault."""
    turned = undecided() if undecided is not None else {}
    for name, (broken, error, noise) in suspects.items():
        if name in turned:
            judgement.flips += int((broken & turned[name]).sum())
            suspects[name] = (broken & ~turned[name], error, noise)
    if precision.itemsize < 4:  # results are rounded to it, sums are in float32, and may overflow there
        wide = evaluate(torch.float32)
        for name, (broken, error, noise) in suspects.items():
            suspects[name] = (broken & as_rows(wide[name]).isfinite().all(-1), error, noise)
    for seed in range(SAMPLES):
        suspects = {name: suspect for name, suspect in suspects.items() if suspect[0].any()}
        if not suspects:
            return
        sample = evaluate(precision, seed=seed)
        for name, (broken, error, noise) in suspects.items():
            far = largest(as_rows(sample[name]) - as_rows(truth[name]))
            noise = torch.where(far.isfinite(), torch.maximum(noise, far), torch.inf)  # at the edge of the range
            suspects[name] = (broken & noise.isfinite() & ~(error <= FACTOR * noise), error, noise)
    for name, (broken, error, noise) in suspects.items():
        if broken.any():
            row = first(broken)
            size = float(largest(as_rows(truth[name]))[row])
            judgement.add(
                name,
                f"{int(broken.sum())} of {broken.numel()} rows differ, first {row}: error {float(error[row]):.3g}, "
                f"largest expected {size:.3g}, by rounding alone {float(noise[row]):.3g}",
            )


def as_rows(x: Tensor) -> Tensor:
    """float64, with rows in the last dimension."""
    return x.detach().double() if x.dim() else x.detach().double().reshape(1)


def largest(x: Tensor) -> Tensor:
    """By row; NaN if there is one."""
    return x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
