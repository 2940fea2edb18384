"""Performer: positive random features whose products estimate the softmax kernel (FAVOR+).

    e^(x.y) = E_w[phi(x) . phi(y)],    x = sqrt(s) q,  y = sqrt(s) k,  s = 1/sqrt(D),  w ~ N(0, I_D)

with m draws of w and, by `kind`,

    positive    m^(-1/2) exp(w.x - |x|^2/2)
    hyperbolic  (2m)^(-1/2) exp(-|x|^2/2) [exp(w.x), exp(-w.x)]
    trig        m^(-1/2) exp(|x|^2/2) [sin(w.x), cos(w.x)]              signed and unstable; for comparison
    relu        relu(w.x) + 1e-3                                        generalized attention, not the softmax kernel
    favor++     (1-4A)^(D/4) m^(-1/2) exp(A|w|^2 + sqrt(1-4A) w.x - |x|^2/2)
                A = (1 - 2p - sqrt((2p+1)^2 + 8p)) / 16,  p = mean_ij |x_i + y_j|^2 / D

Choromanski et al., 2021; favor++: Likhosherstov et al., 2022. O((N + M) m D) time, an (m, Dv) state.

Each key has its own largest exponent b_j, and the engine keeps its sums relative to the largest b_j so far. Subtracting one
maximum over the whole sequence, as is often done, would let later keys change earlier outputs. For inputs so large that all
products of features underflow, nothing is left of the estimate, and the output is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from subquad.engines.call import Call
from subquad.families.base import Info, Sizes
from subquad.families.feature_maps import require_positive_scale
from subquad.families.kernelized import MEMORY, STATE, TIME, Kernelized, refuses
from subquad.families.random_features import gaussian, orthogonal
from subquad.ops.feature_map import FeatureMap, NativeMap
from subquad.ops.kernelized import KernelizedRule
from subquad.ops.precision import compute_dtype

Kind = Literal["positive", "hyperbolic", "trig", "relu", "favor++"]
KINDS: tuple[Kind, ...] = ("positive", "hyperbolic", "trig", "relu", "favor++")

INFO = Info(
    name="performer",
    family="kernelized",
    engine="kernelized",
    idea="positive orthogonal random features whose products are an unbiased estimate of the softmax kernel",
    paper="Choromanski et al., 2021, Rethinking Attention with Performers, arXiv:2009.14794",
    time=TIME,
    memory=MEMORY,
    state=STATE,
    random="the m feature directions",
    refuses=refuses(),
)


@dataclass(frozen=True, kw_only=True)
class Performer(Kernelized):
    """Random-feature attention (FAVOR+).

    Args:
        kind: the feature map; see the top of this file.
        features: m, the number of random directions; the error falls as 1/sqrt(m).
        orthogonal: draw the directions in orthogonal blocks, which lowers the error; False draws them independently.
        regularized: give all orthogonal directions the length sqrt(D) instead of chi(D) distributed lengths.
        p: for "favor++", the mean of |x_i + y_j|^2 / D that the map is tuned for. None measures it in each call, which needs a
            bidirectional call without padding; `measure_p` returns a value to pass here.
        seed: the seed of the directions.
    """

    info: ClassVar[Info] = INFO
    kind: Kind = "positive"
    features: int = 256
    orthogonal: bool = True
    regularized: bool = False
    p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._require_choice("kind", KINDS)
        self._require_rows("features")
        self._require_flag("orthogonal", "regularized")
        self._require_seed()
        if self.p is not None:
            self._require_positive("p")
            if self.kind != "favor++":
                self._refuse("p", f"is only for kind='favor++', but kind is {self.kind!r}; leave p out")
        if self.regularized and not self.orthogonal:
            self._refuse("regularized", "needs orthogonal=True, and orthogonal is False")

    @property
    def refuses(self) -> Mapping[str, str]:
        if self.kind != "favor++" or self.p is not None:
            return self.info.refuses
        return {
            **self.info.refuses,
            "is_causal": "kind='favor++' without p measures p on the whole sequence, including the future; set p",
            "decoder_cross": "kind='favor++' without p measures p on all queries, so each would depend on later ones; set p",
            "key_padding_mask": "kind='favor++' without p measures p on all queries, including those of pads; set p",
        }

    def buffers(self, sizes: Sizes) -> dict[str, Tensor]:
        if self.orthogonal:
            return {"projection": orthogonal(self.features, sizes.head_dim, self.seed, regularized=self.regularized)}
        return {"projection": gaussian(self.features, sizes.head_dim, self.seed)}

    def rule(self, call: Call) -> KernelizedRule:
        require_positive_scale(call.scale, self.info.name)
        w = call.weights["projection"].to(compute_dtype(call.query))  # (m, D)
        scale, a = call.softmax_scale, None
        if self.kind == "favor++":
            p = measure_p(call.query, call.key, scale=scale) if self.p is None else torch.full_like(w[0, 0], self.p)
            a = shrinkage(p)
        # Of one length, all directions have the same A|w|^2: a factor that cancels, and that rounding must not make different.
        norms = torch.zeros_like(w[:, 0]) if self.regularized else None
        feature_map = FeatureMap(
            query=lambda x: exponentiate(exponents(x, w, self.kind, scale, a, norms), self.kind)[0],
            key=lambda x: features(x, w, self.kind, scale, a, norms),
            features=self.features * (2 if self.kind in ("hyperbolic", "trig") else 1),
            weights=(w,),
            native=native_map(w, self.kind, scale, self.p, norms),
            is_signed=self.kind == "trig",
        )
        return KernelizedRule(feature_map=feature_map)


def native_map(w: Tensor, kind: Kind, scale: float, p: float | None, norms: Tensor | None = None) -> NativeMap | None:
    """The map of `features` in the compiled kernel, if the kernel has it."""
    weight = (torch.cat([w, -w]) if kind == "hyperbolic" else w) * math.sqrt(scale)
    if kind == "relu":
        return NativeMap("relu", constant=1e-3, weight=weight)
    constant = -math.log(weight.shape[0]) / 2
    if kind in ("positive", "hyperbolic"):
        return NativeMap("exponential", scale, constant, weight)
    if kind == "trig" or p is None:
        return None
    a = shrinkage(p)
    constant += w.shape[1] / 4 * math.log(1 - 4 * a)
    return NativeMap("exponential", scale, constant, weight * math.sqrt(1 - 4 * a), a * squares(w, norms))


def shrinkage(p: Any) -> Any:
    """A as a function of p, a number or a tensor."""
    root = (2 * p + 1) * (1 + 8 * p / (2 * p + 1) / (2 * p + 1)) ** 0.5  # of (2p + 1)^2 + 8p, which may overflow
    return (1 - 2 * p - root) / 16


def squares(w: Tensor, norms: Tensor | None) -> Tensor:
    """|w|^2 (m,) of each direction; `norms` instead, if given."""
    return w.square().sum(-1) if norms is None else norms


def features(
    x: Tensor, w: Tensor, kind: Kind, scale: float = 1.0, a: Tensor | None = None, norms: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """phi(sqrt(scale) x) = e^b f for x (..., n, D), w (m, D): f (..., n, m or 2m), b (..., n, 1).

    `a` is A of "favor++"; `norms` (m,) are taken for |w|^2, up to a constant.
    """
    f, peak = exponentiate(exponents(x, w, kind, scale, a, norms), kind)
    if kind == "relu":
        return f, None
    b = x.square().sum(-1, keepdim=True) * (scale / 2 if kind == "trig" else -scale / 2)
    b = b - math.log(w.shape[0] if kind == "trig" else f.shape[-1]) / 2
    if peak is not None:
        b = b + peak
    if a is not None:
        b = b + w.shape[1] / 4 * (1 - 4 * a).log()
    return f, b


def exponents(x: Tensor, w: Tensor, kind: Kind, scale: float, a: Tensor | None, norms: Tensor | None = None) -> Tensor:
    """w.x; for "hyperbolic" [w.x, -w.x]; for "favor++" A|w|^2 + sqrt(1-4A) w.x."""
    u = x @ (w * math.sqrt(scale)).mT  # (..., n, m)
    if kind == "hyperbolic":
        return torch.cat([u, -u], dim=-1)
    return u if a is None else a * squares(w, norms) + (1 - 4 * a).sqrt() * u


def exponentiate(u: Tensor, kind: Kind) -> tuple[Tensor, Tensor | None]:
    """The features up to a factor e^peak for each row; a peak of None means 0."""
    if kind == "relu":
        return u.relu() + 1e-3, None
    if kind == "trig":
        return torch.cat([u.sin(), u.cos()], dim=-1), None
    peak = u.detach().amax(-1, keepdim=True)
    return u.sub_(peak).exp_(), peak


def measure_p(query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
    """The mean of |x_i + y_j|^2 / D over all pairs and heads of each sequence, for "favor++": (B, 1, 1, 1).

    To fix the value measured on a sample, use `Performer(kind="favor++", p=measure_p(query, key).mean().item())`.
    """
    dim = key.shape[-1]
    if not query.numel() or not key.numel():
        return query.new_zeros(query.shape[0], 1, 1, 1, dtype=compute_dtype(query))
    x, y = (t.to(compute_dtype(t)).unflatten(1, (key.shape[1], -1)) for t in (query, key))  # (B, K, G or 1, n, D)
    squares = (t.square().sum(-1).mean((1, 2, 3)) for t in (x, y))
    cross = (x.mean(3) * y.mean(3)).sum(-1).mean((1, 2))
    scale = dim**-0.5 if scale is None else scale
    return ((sum(squares) + 2 * cross) * scale / dim).reshape(-1, 1, 1, 1)
