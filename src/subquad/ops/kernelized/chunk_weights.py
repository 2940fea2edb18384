"""The weights of the causal form: of each key inside a chunk, and of the sums before the chunk.

A key enters as phi = e^b f. Weights are kept relative to a level, the largest b so far, and the sums are rescaled when the
level rises. Every factor is then at most 1, whatever the keys are. Pads have b = -inf, and so has the level before the first
key; weights are then relative to 0.

B batch, K key-value heads, G query heads per key-value head, Dv value channels, m features, c chunks of C tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.masks import causal

CHUNK = 64  # tokens per chunk
_EXACT_CHUNK = 16  # if each channel has its own level at each token, which takes a product of size C * C * m
NO_LEVEL = -math.inf  # before the first key
_SAFE_RISE = 60.0  # e^60 and e^-60 are well inside the range of float32


@dataclass(frozen=True)
class Weights(ABC):
    """The weights at each query of a chunk: of the chunk's keys, and of the sums before the chunk."""

    since: Tensor | None  # (B, K, c, C or 1, 1 or m): of the sums, at query i. None: 1
    level: Tensor | None  # (B, K, 1, 1 or m), after the last chunk
    chunk: int

    @property
    def decay(self) -> Tensor | None:
        """The weight of the sums before the chunk at its end: (B, K, c, 1, 1 or m)."""
        return None if self.since is None else self.since[..., -1:, :]

    def read(self, fq: Tensor, S: Tensor) -> Tensor:
        """fq (B, K, c, G, C, m) times the sums before its chunk: (B, K, c, G, C, Dv + 1)."""
        since = None if self.since is None else self.since.unsqueeze(3)
        if since is not None and since.shape[-1] > 1:
            fq, since = fq * since, None
        out = (fq.flatten(3, 4) @ S).unflatten(3, fq.shape[3:5])
        return out if since is None else out * since

    @abstractmethod
    def scores(self, fq: Tensor) -> Tensor:
        """fq (B, K, c, G, C, m) times the keys of its chunk: (B, K, c, G, C, C), 0 above the diagonal."""

    @abstractmethod
    def sums(self, value: Tensor) -> Tensor:
        """What the chunk adds to the sums at its end: (B, K, c, m, Dv + 1)."""

    def total(self, z: Tensor) -> Tensor:
        """sum_j phi(k_j) up to each query: (B, K, c, C, m). z (B, K, c, 1, m) is that sum before the chunk."""
        return self._inside() + (z if self.since is None else self.since * z)

    @abstractmethod
    def _inside(self) -> Tensor: ...


@dataclass(frozen=True)
class _Equal(Weights):
    """A key has the same weight for all queries of its chunk."""

    phi: Tensor  # (B, K, c, C, m)

    def scores(self, fq: Tensor) -> Tensor:
        return _products(fq, self.phi).tril_()

    def sums(self, value: Tensor) -> Tensor:
        return self.phi.mT @ value

    def _inside(self) -> Tensor:
        return self.phi.cumsum(-2)


@dataclass(frozen=True)
class _ByPair(Weights):
    """Each query weighs each key by a factor."""

    f: Tensor  # (B, K, c, C, m)
    within: Tensor  # (B, K, c, C, C), or its last row (B, K, c, 1, C) if only that matters

    def scores(self, fq: Tensor) -> Tensor:
        return (_products(fq, self.f) * self.within.unsqueeze(3)).tril_()  # because 0 times a NaN of a later key is NaN

    def sums(self, value: Tensor) -> Tensor:
        return self.f.mT @ (value * self.within[..., -1, :].unsqueeze(-1))

    def _inside(self) -> Tensor:
        return self.within @ self.f


@dataclass(frozen=True)
class _ByChannel(Weights):
    """Each query weighs each channel of each key by a factor; f is 1."""

    within: Tensor  # (B, K, c, C, C, m)

    def scores(self, fq: Tensor) -> Tensor:
        return (fq.unsqueeze(-2) * self.within.unsqueeze(3)).sum(-1)

    def sums(self, value: Tensor) -> Tensor:
        return self.within[..., -1, :, :].mT @ value

    def _inside(self) -> Tensor:
        return self.within.sum(-2)


def _products(fq: Tensor, f: Tensor) -> Tensor:
    return (fq.flatten(3, 4) @ f.mT).unflatten(3, fq.shape[3:5])


def equal(phi: Tensor) -> Weights:
    """phi (B, K, c, C, m), without b."""
    return _Equal(None, None, phi.shape[3], phi)


def levelled_by_key(f: Tensor, b: Tensor, level: Tensor) -> Weights:
    """phi = e^b f, b (B, K, c, C, 1)."""
    within, since, end = _relative(b, level)
    return _ByPair(since, end, b.shape[3], f, within.squeeze(-1))


def levelled_by_channel(b: Tensor, level: Tensor) -> Weights:
    """phi = e^b, b (B, K, c, C, m). The chunks of the result may be shorter."""
    tops = _tops(b, level)
    if _rises_gently(b, tops, level):
        return _relative_to_tops(b, tops, level)
    if b.shape[3] % _EXACT_CHUNK == 0:
        b = b.flatten(2, 3).unflatten(2, (-1, _EXACT_CHUNK))
    within, since, end = _relative(b, level)
    return _ByChannel(since, end, b.shape[3], within)


def levelled_by_chunk(f: Tensor | None, b: Tensor, level: Tensor) -> Weights:
    """phi = e^b f, b (B, K, c, C, 1), or phi = e^b, b (B, K, c, C, m), if only the sums at the ends of chunks matter."""
    tops = _tops(b, level)
    if f is None:
        return _relative_to_tops(b, tops, level)
    before, end = _before(tops, level)
    base = _base(tops)
    return _ByPair((before - base).exp(), end, b.shape[3], f, (b - base).exp_().mT)


def decayed(f: Tensor, log_decay: Tensor) -> Weights:
    """Weights prod_t g_t over j < t <= i, summed in log space without subtracting running totals; log g (B, K, c, C, 1)."""
    length = log_decay.shape[3]
    allowed = causal(length, length, f.device)
    later = allowed & ~torch.eye(length, dtype=torch.bool, device=f.device)  # t > j
    passed = log_decay.expand(*log_decay.shape[:-1], length).masked_fill(~later, 0.0).cumsum(-2)
    within = passed.masked_fill_(~allowed, -math.inf).exp_()
    return _ByPair(log_decay.cumsum(-2).exp(), None, length, f, within)


def _relative(b: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e^b relative to the largest b up to each query, so that all weights are at most 1 and the largest is 1.

    Returns the weights of keys (B, K, c, C, C, x) and of the sums before (B, K, c, C, x), and the level after (B, K, 1, x).
    """
    top = torch.maximum(b.detach().flatten(2, 3).cummax(2).values, level).unflatten(2, b.shape[2:4])
    before, end = _before(top[..., -1:, :], level)
    base = _base(top)
    future = ~causal(b.shape[3], b.shape[3], b.device).unsqueeze(-1)
    within = (b.unsqueeze(-3) - base.unsqueeze(-2)).masked_fill_(future, -math.inf).exp_()
    return within, (before - base).exp(), end


def _relative_to_tops(b: Tensor, tops: Tensor, level: Tensor) -> Weights:
    """Relative to the largest b up to the end of each chunk, so that a key has the same weight for all queries of its chunk."""
    before, end = _before(tops, level)
    base = _base(tops)
    return _Equal((before - base).exp(), end, b.shape[3], (b - base).exp_())


def _tops(b: Tensor, level: Tensor) -> Tensor:
    """The largest b up to the end of each chunk: (B, K, c, 1, 1 or m)."""
    return torch.maximum(b.detach().amax(3, keepdim=True).cummax(2).values, level.unsqueeze(2))


def _rises_gently(b: Tensor, tops: Tensor, level: Tensor) -> bool:
    """Whether no channel rises so far inside a chunk that its earlier keys would vanish. False if the values are unknown."""
    if torch.compiler.is_compiling() or not b.numel():
        return False
    first = torch.maximum(_before(tops, level)[0], b.detach()[..., :1, :])  # the level at the chunk's first token
    try:
        return bool((_base(tops) - first).masked_fill(tops == NO_LEVEL, 0).max() <= _SAFE_RISE)
    except RuntimeError:  # meta tensors, fake tensors and vmap have no values to look at
        return False


def _before(ends: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Levels at the end of each chunk (B, K, c, 1, x) -> levels before each chunk, and after the last (B, K, 1, x)."""
    return torch.cat([start.unsqueeze(2), ends[:, :, :-1]], dim=2), ends[:, :, -1]


def _base(level: Tensor) -> Tensor:
    """What exponents are taken relative to: the level, and 0 where there has been no key, for no infinity less infinity."""
    return level.masked_fill(level == NO_LEVEL, 0)
