"""Which tokens attend to which: the attention matrix of any mechanism, read off its output.

With the identity as values the output is the matrix itself, whatever computed it:

    o_i = sum_j A_ij v_j = A_i    for v_j = e_j

All heads get the same random queries and keys, so heads differ in the picture only where the mechanism treats them differently.

N tokens, H heads, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from subquad import checks
from subquad.attention import MechanismModule, attention
from subquad.errors import InputError
from subquad.families.base import Mechanism
from subquad.registry import resolve

MAX_LENGTH = 4096
# Mechanisms of these families select pairs, and the picture shows which. The others weight all pairs: it shows the weights.
_SELECTING = ("exact", "sparse", "bucketed")
_FIXED = ("exact", "sparse")
# Long enough that the default options leave out some pairs.
_LENGTHS = {"exact": 1024, "sparse": 1024, "bucketed": 256, "low_rank": 256, "hybrid": 256}


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Heads with equal attention, and one figure: the fraction of pairs that they select, or the error of their weights."""

    heads: tuple[int, ...]
    weights: Tensor  # (N, N); 1 for selected pairs
    share: float | None  # of all N^2 pairs
    error: float | None  # |A - softmax's| / |softmax's|, Frobenius

    @property
    def label(self) -> str:
        first, last = self.heads[0], self.heads[-1]
        is_run = last - first + 1 == len(self.heads)
        names = f"{first}-{last}" if is_run and last > first else ", ".join(map(str, self.heads))
        figure = f"{self.share:.1%}" if self.share is not None else f"error {self.error:.3g}"
        return f"head{'s' if last > first else ''} {names}: {figure}"


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention matrices of one mechanism on one random input; `share` and `error` as in `HeadGroup`, over all heads."""

    mechanism: Mechanism
    length: int
    is_causal: bool
    seed: int
    has_parameters: bool
    groups: tuple[HeadGroup, ...]
    share: float | None
    error: float | None
    exact: Tensor | None  # (N, N), softmax's, if weights are shown

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ from the defaults."""
        defaults = type(self.mechanism)()
        values = {f.name: getattr(self.mechanism, f.name) for f in fields(self.mechanism)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if value != getattr(defaults, name)}

    @property
    def causal_share(self) -> float | None:
        """The fraction of the N (N + 1) / 2 causal pairs."""
        return self.share * 2 * self.length / (self.length + 1) if self.share is not None and self.is_causal else None

    @property
    def title(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        name = self.mechanism.info.name + (f"({options})" if options else "")
        return f"{name}, {self.length} tokens, {'causal' if self.is_causal else 'bidirectional'}"

    @property
    def panels(self) -> list[tuple[str, Tensor]]:
        """What to draw, each matrix with its label."""
        drawn = [(group.label, group.weights) for group in self.groups]
        return drawn if self.exact is None else [*drawn, ("exact softmax", self.exact)]

    @property
    def caption(self) -> list[str]:
        """What the picture shows, and what it depends on."""
        causal = f", {self.causal_share:.1%} of the causal ones" if self.causal_share is not None else ""
        if self.exact is None:
            lines = [f"Pairs that attend: {self.share:.1%} of all{causal}."]
        else:
            lines = [f"Effective weights: relative error {self.error:.3g} against exact softmax (Frobenius norm)."]
        lines += [f"Causal only: {reason}." for reason in self.mechanism.reasons(["bidirectional"]).values()]
        if self.mechanism.info.family not in _FIXED:
            lines.append(f"Depends on the input: random queries and keys, seed {self.seed}.")
        if self.has_parameters:
            lines.append("Its parameters are untrained.")
        return lines

    def facts(self) -> dict[str, Any]:
        """The figures, as JSON has them."""
        return {
            "method": self.mechanism.info.name,
            "options": self.options,
            "length": self.length,
            "is_causal": self.is_causal,
            "seed": self.seed,
            "share_of_pairs": self.share,
            "share_of_causal_pairs": self.causal_share,
            "relative_error": self.error,
            "groups": [{"heads": g.heads, "share_of_pairs": g.share, "relative_error": g.error} for g in self.groups],
        }


def attention_map(
    method: str | Mechanism,
    *,
    length: int | None = None,
    heads: int = 4,
    head_dim: int = 64,
    is_causal: bool | None = None,
    seed: int = 0,
) -> AttentionMap:
    """The attention matrices of `method`.

    Args:
        method: a name or a mechanism.
        length: N, at most 4096; None for 64 to 1024, depending on the family.
        heads, head_dim: H and D.
        is_causal: None for bidirectional if the mechanism supports that.
        seed: of the random queries, keys and initial parameters.
    """
    mechanism = resolve(method)
    selects = mechanism.info.family in _SELECTING and mechanism.info.engine != "clustered"  # that engine weights every pair
    length = _LENGTHS.get(mechanism.info.family, 64) if length is None else length
    is_causal = bool(mechanism.reasons(["bidirectional"])) if is_causal is None else is_causal
    checks.sizes(length=length, heads=heads, head_dim=head_dim)
    if length > MAX_LENGTH:
        raise InputError(f"a picture of N x N pairs can have at most {MAX_LENGTH} tokens; got {length}. Choose fewer.")
    if not 0 <= seed < 2**63:
        raise InputError(f"seed must be an integer from 0 to 2**63 - 1; got {seed}.")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        query = torch.randn(1, 1, length, head_dim)
        key = query if mechanism.shares_query_and_key else torch.randn(1, 1, length, head_dim)
        sizes = {"heads": heads, "head_dim": head_dim, "value_dim": length, "dim": heads * head_dim}
        module = mechanism.without_values().build(**sizes).eval()
        matrices = _matrices(module, query, key, is_causal)
        if selects:
            matrices = (matrices != 0).float()
        exact = None if selects else attention(query, key, torch.eye(length)[None, None], is_causal=is_causal)[0, 0]
    groups = [HeadGroup(equal, matrices[equal[0]], *_figures(matrices[equal[0]], exact)) for equal in _equal_heads(matrices)]
    share, error = _figures(matrices, exact)
    return AttentionMap(
        mechanism=mechanism,
        length=length,
        is_causal=is_causal,
        seed=seed,
        has_parameters=any(True for _ in module.parameters()),
        groups=tuple(groups),
        share=share,
        error=error,
        exact=exact,
    )


def _matrices(module: MechanismModule, query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    """(H, N, N)."""
    sizes, length = module.sizes, query.shape[2]
    q = query.expand(1, sizes.heads, -1, -1)
    k = q if key is query else key.expand(1, sizes.heads, -1, -1)
    identity = torch.eye(length).expand(1, sizes.heads, -1, -1)
    hidden = torch.randn(1, length, sizes.heads * sizes.head_dim) if module.method.reads_tokens else None
    return module(q, k, identity, is_causal=is_causal, hidden=hidden)[0]


def _equal_heads(matrices: Tensor) -> list[tuple[int, ...]]:
    """Groups of heads with the same matrix, up to rounding."""
    groups: list[tuple[int, ...]] = []
    for head, matrix in enumerate(matrices):
        same = next((i for i, g in enumerate(groups) if torch.allclose(matrix, matrices[g[0]], rtol=1e-4, atol=1e-6)), None)
        if same is None:
            groups.append((head,))
        else:
            groups[same] += (head,)
    return groups


def _figures(weights: Tensor, exact: Tensor | None) -> tuple[float | None, float | None]:
    """`share` and `error` of (..., N, N)."""
    if exact is None:
        return weights.mean(dtype=torch.float64).item(), None
    difference, whole = (x.norm(dtype=torch.float64) for x in (weights - exact, exact.expand_as(weights)))
    return None, (difference / whole).item()
