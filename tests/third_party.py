"""Mechanisms as another package would define them; worker processes import this module to know them.

Importing it registers them for good, so tests use the fixture `third_party` of tests/conftest.py instead.
"""

from dataclasses import dataclass
from typing import ClassVar

import subquad as sq
from subquad.families.kernelized import MEMORY, STATE, TIME, Kernelized, refuses
from subquad.ops.feature_map import FeatureMap
from subquad.ops.kernelized import KernelizedRule


def phi(x):
    return x.square() + 0.1


def squares(mechanism, query, key, value, *, allowed, **_):
    weights = phi(query) @ phi(key).mT * allowed
    return weights @ value / weights.sum(-1, keepdim=True)


def info(name):
    return sq.Info(
        name=name, family="kernelized", engine="kernelized", idea="squares as features", paper="nobody", replaces_softmax=True,
        time=TIME, memory=MEMORY, state=STATE, refuses=refuses(scale="its feature map has no scale"),
    )  # fmt: skip


class Squares(Kernelized):
    def rule(self, call):
        return KernelizedRule(feature_map=FeatureMap.symmetric(phi, call.key.shape[-1]))


@sq.register
@dataclass(frozen=True, kw_only=True)
class Checked(Squares):
    info: ClassVar[sq.Info] = info("checked_squares")
    reference = squares


@sq.register
@dataclass(frozen=True, kw_only=True)
class Unchecked(Squares):
    info: ClassVar[sq.Info] = info("unchecked_squares")
