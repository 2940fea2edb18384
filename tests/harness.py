"""Every registered mechanism, with its default options and its variants, ready to run beside its reference.

Sizes are small primes, all different, so that a swapped axis cannot pass by luck.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import subquad as sq
from subquad import reference
from subquad.mechanisms import MECHANISMS
from tests.options import small, variants

BATCH, HEADS, DIM, VALUE_DIM, WIDTH = 2, 3, 5, 7, 11
SIZES = (1, 2, 7, 63, 64, 65, 127, 300)


@dataclass
class Inputs:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    hidden: torch.Tensor

    def map(self, change):
        return Inputs(*(change(t) for t in self))

    def __iter__(self):
        return iter((self.query, self.key, self.value, self.hidden))

    def tokens(self, *index):
        """The given tokens of a self-attention input."""
        i = slice(*index)
        return Inputs(self.query[:, :, i], self.key[:, :, i], self.value[:, :, i], self.hidden[:, i])


def inputs(queries, keys=None, *, batch=BATCH, heads=HEADS, kv_heads=None, dtype=torch.float64, grad=False, seed=1):
    generator = torch.Generator().manual_seed(seed)
    keys, kv_heads = queries if keys is None else keys, kv_heads or heads

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    return Inputs(
        normal(batch, heads, queries, DIM),
        normal(batch, kv_heads, keys, DIM),
        normal(batch, kv_heads, keys, VALUE_DIM),
        normal(batch, keys, WIDTH),
    )


@dataclass(frozen=True)
class Case:
    config: sq.Mechanism

    @property
    def info(self):
        return self.config.info

    def why_not(self, **needs):
        return sq.why_not(self.config, **needs)

    def skip_unless(self, **needs):
        if reasons := self.why_not(**needs):
            pytest.skip("; ".join(reasons))

    @property
    def directions(self):
        """The values of is_causal that the mechanism has a meaning for."""
        needs = {False: "bidirectional", True: "is_causal"}
        return [is_causal for is_causal, need in needs.items() if not self.why_not(**{need: True})]

    def at_most(self, keys):
        """`keys`, or as many as the mechanism is built for, where that is fewer."""
        return min(keys, getattr(self.config, "max_length", keys))

    def build(self, *, heads=HEADS, kv_heads=None, dtype=torch.float64):
        return _build(self.config, heads, kv_heads or heads, dtype)

    def module_for(self, x):
        return self.build(heads=x.query.shape[1], kv_heads=x.key.shape[1], dtype=x.query.dtype)

    def query(self, x):
        """The queries; where one tensor is both, the keys, since it is them that tests put into pads."""
        return x.key if self.config.shares_query_and_key and x.query.shape == x.key.shape else x.query

    def run(self, x, module=None, **options):
        hidden = x.hidden if self.config.reads_tokens else None
        return (module or self.module_for(x))(self.query(x), x.key, x.value, hidden=hidden, **options)

    def function(self, x, **options):
        return sq.attention(self.query(x), x.key, x.value, self.config, **options)

    def reference(self, x, module=None, **options):
        module = module or self.module_for(x)
        weights = dict(module.named_parameters()) | dict(module.named_buffers())
        return reference.attention(self.config, self.query(x), x.key, x.value, weights=weights, hidden=x.hidden, **options)


@cache
def _build(config, heads, kv_heads, dtype):
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype.itemsize > 2 else torch.float32)
    torch.manual_seed(0)
    try:
        module = config.build(heads=heads, kv_heads=kv_heads, head_dim=DIM, value_dim=VALUE_DIM, dim=WIDTH).eval()
    finally:
        torch.set_default_dtype(previous)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4
    return module


DEFAULTS = [Case(cls(**small(cls.info.name))) for cls in MECHANISMS]
CASES = [Case(cls(**{**small(cls.info.name), **options})) for cls in MECHANISMS for options in ({}, *variants(cls.info.name))]


def _name(case):
    usual = type(case.config)(**small(case.info.name))
    options = [f"{k}={v}" for k, v in vars(case.config).items() if v != getattr(usual, k)]
    return "-".join([case.info.name, *options])


every_case = pytest.mark.parametrize("case", CASES, ids=_name)
every_default = pytest.mark.parametrize("case", DEFAULTS, ids=_name)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, views of others left out."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and t._base is None:
                self.numel = max(self.numel, t.numel())
        return out


def relative_error(found, expected):
    """The largest difference, relative to the largest expected value."""
    if not expected.numel():
        assert found.shape == expected.shape
        return 0.0
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item()


# float64 has 2e-16; signed denominators (trig, rfa) lose some digits.
ROUNDING = 1e-9


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert relative_error(found, expected) < ROUNDING
