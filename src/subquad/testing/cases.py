"""A mechanism with its options, ready to run beside its reference, and random inputs for it.

Sizes are small primes, all different, so that a swapped axis cannot pass by luck.
B batch, H heads, Hkv key-value heads, N queries, M keys, D channels, Dv value channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subquad import reference
from subquad.attention import MechanismModule, attention
from subquad.errors import OptionError
from subquad.families.base import Info, Mechanism
from subquad.ops.dispatch import disabled
from subquad.registry import why_not

BATCH, HEADS, DIM, VALUE_DIM, WIDTH = 2, 3, 5, 7, 11
SIZES = (1, 2, 7, 63, 64, 65, 127, 300)


@dataclass
class Inputs:
    """Query (B, H, N, D), key (B, Hkv, M, D), value (B, Hkv, M, Dv), and the tokens they come from, `hidden` (B, M, width)."""

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        return Inputs(*(change(t) for t in self))

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.query, self.key, self.value, self.hidden))

    def tokens(self, *index: int) -> Inputs:
        """The tokens of `slice(*index)`, in self-attention."""
        i = slice(*index)
        return Inputs(self.query[:, :, i], self.key[:, :, i], self.value[:, :, i], self.hidden[:, i])

    def followed_by(self, other: Inputs) -> Inputs:
        """The tokens of both, one after the other."""
        return Inputs(*(torch.cat([a, b], dim=dim) for a, b, dim in zip(self, other, (2, 2, 2, 1), strict=True)))


def inputs(
    queries: int,
    keys: int | None = None,
    *,
    batch: int = BATCH,
    heads: int = HEADS,
    kv_heads: int | None = None,
    dim: int = DIM,
    value_dim: int = VALUE_DIM,
    dtype: torch.dtype = torch.float64,
    grad: bool = False,
    seed: int = 1,
) -> Inputs:
    """Normally distributed inputs, the same numbers in every precision."""
    generator = torch.Generator().manual_seed(seed)
    keys, kv_heads = queries if keys is None else keys, kv_heads or heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    return Inputs(
        normal(batch, heads, queries, dim),
        normal(batch, kv_heads, keys, dim),
        normal(batch, kv_heads, keys, value_dim),
        normal(batch, keys, WIDTH),
    )


@dataclass(frozen=True)
class Case:
    """A mechanism under test. Its weights are drawn from a fixed seed, away from their initial values."""

    mechanism: Mechanism

    @property
    def info(self) -> Info:
        return self.mechanism.info

    @property
    def name(self) -> str:
        """The name, and the options that are not at their defaults: `local-window=3`."""
        usual = type(self.mechanism)()
        values = {f.name: getattr(self.mechanism, f.name) for f in fields(self.mechanism)}  # type: ignore[arg-type]
        return "-".join([self.info.name, *(f"{k}={v}" for k, v in values.items() if v != getattr(usual, k))])

    def why_not(self, **needs: bool) -> list[str]:
        return why_not(self.mechanism, **needs)

    @property
    def directions(self) -> list[bool]:
        """The values of is_causal that the mechanism supports."""
        needs = {False: "bidirectional", True: "is_causal"}
        return [is_causal for is_causal, need in needs.items() if not self.why_not(**{need: True})]

    def at_most(self, keys: int) -> int:
        """`keys`, or the largest number of keys that the mechanism is built for."""
        return min(keys, getattr(self.mechanism, "max_length", keys))

    def build(
        self,
        *,
        heads: int = HEADS,
        kv_heads: int | None = None,
        dim: int = DIM,
        value_dim: int = VALUE_DIM,
        dtype: torch.dtype = torch.float64,
    ) -> MechanismModule:
        """Its module in evaluation mode; the same one for the same sizes."""
        return _build(self.mechanism, heads, kv_heads or heads, dim, value_dim, dtype)

    def module_for(self, x: Inputs) -> MechanismModule:
        _, heads, _, dim = x.query.shape
        return self.build(heads=heads, kv_heads=x.key.shape[1], dim=dim, value_dim=x.value.shape[3], dtype=x.query.dtype)

    def query(self, x: Inputs) -> Tensor:
        """The queries; the keys where one tensor is both, since tests put pads into the keys."""
        return x.key if self.mechanism.shares_query_and_key and x.query.shape == x.key.shape else x.query

    def run(self, x: Inputs, module: Callable[..., Any] | None = None, **options: Any) -> Any:
        """The output of the module, and the new state if `return_state`."""
        hidden = x.hidden if self.mechanism.reads_tokens else None
        return (module or self.module_for(x))(self.query(x), x.key, x.value, hidden=hidden, **options)

    def function(self, x: Inputs, **options: Any) -> Any:
        """The output of the plain function."""
        return attention(self.query(x), x.key, x.value, self.mechanism, **options)

    def reference(self, x: Inputs, module: MechanismModule | None = None, **options: Any) -> Tensor:
        """The output of the readable code, with the weights of the module."""
        if type(self.mechanism).reference is None and self.info.name not in reference.FUNCTIONS:
            raise OptionError(
                f"the contract compares {self.info.name} with its reference, and it has none. Set the class variable "
                f"{type(self.mechanism).__name__}.reference to a function with the signature of those in subquad.reference."
            )
        module = module or self.module_for(x)
        weights = dict(module.named_parameters()) | dict(module.named_buffers())
        return reference.attention(self.mechanism, self.query(x), x.key, x.value, weights=weights, hidden=x.hidden, **options)


@cache
def _build(mechanism: Mechanism, heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype) -> MechanismModule:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype.itemsize > 2 else torch.float32)
    torch.manual_seed(0)
    try:
        module: MechanismModule = mechanism.build(
            heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=value_dim, dim=WIDTH
        ).eval()
    finally:
        torch.set_default_dtype(previous)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    return module


class Largest(TorchDispatchMode):
    """Measures the largest tensor that any operation makes; views do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "subquad":  # what its body in PyTorch makes counts, too
            with self, disabled():
                out = func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and t._base is None:
                self.numel = max(self.numel, t.numel())
        return out
