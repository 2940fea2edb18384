"""Single measurements: the time of a call, its peak memory, and its error against exact softmax.

B batch, H heads, N tokens, D channels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from subquad import reference
from subquad.bench.results import BASELINE, Pass, Setting
from subquad.errors import InputError, SubquadError
from subquad.families.base import Mechanism
from subquad.registry import resolve
from subquad.runs.tensor_file import read_tensors

MIN_SECONDS = 0.005  # of a timing; shorter calls are repeated
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CHECKED_LENGTH = 150  # tokens on which a method must agree with its reference


class DisagreementError(SubquadError):
    """A method whose output is not that of its reference, so that its speed means nothing."""


def inputs(setting: Setting, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal query, key and value (B, H, N, D)."""
    generator = torch.Generator().manual_seed(seed)
    shape = setting.batch, setting.heads, length, setting.head_dim
    dtype = getattr(torch, setting.dtype)
    query, key, value = (torch.randn(shape, generator=generator).to(setting.device, dtype) for _ in range(3))
    return query, key, value


def saved_inputs(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value (B, H, N, D) of a model, from a file with tensors of these names."""
    saved = read_tensors(path)
    names = ("query", "key", "value")
    if not isinstance(saved, dict) or not all(isinstance(saved.get(name), Tensor) for name in names):
        got = ", ".join(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
        raise InputError(f"{path} must contain tensors named query, key and value; got {got}.")
    for name in names:
        if not _is_plain(saved[name]):
            raise InputError(
                f"{name} in {path} must be a dense tensor of float16, bfloat16, float32 or float64, on the CPU and with all of "
                f"its entries; got {saved[name].layout}, {saved[name].dtype}, {saved[name].device}. Save a contiguous copy."
            )
    query, key, value = (saved[name] for name in names)
    if query.dim() != 4 or not query.shape == key.shape == value.shape:
        shapes = ", ".join(str(tuple(saved[name].shape)) for name in names)
        raise InputError(f"query, key and value in {path} must have one shape, (batch, heads, tokens, channels); got {shapes}.")
    if not all(x.isfinite().all() for x in (query, key, value)):
        raise InputError(f"query, key and value in {path} must be finite; got NaN or infinity. Save them again.")
    return query, key, value


def _is_plain(x: Tensor) -> bool:
    """Whether it can be computed with, and has its size on the disk: entries that share memory could stand for terabytes."""
    is_dense = x.layout == torch.strided and x.device.type == "cpu" and not x.is_nested and x.numel() > 0
    return is_dense and x.dtype in _DTYPES and x.untyped_storage().nbytes() >= x.nbytes


def call(method: str, setting: Setting, length: int, qkv: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Tensor]:
    """A forward pass of `method`."""
    query, key, value = qkv
    if method == BASELINE:
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=setting.is_causal)
    mechanism = resolve(method).for_length(length)
    key = query if mechanism.shares_query_and_key else key
    module = _build(mechanism, setting)
    hidden = _hidden(mechanism, setting, length)
    return lambda: module(query, key, value, is_causal=setting.is_causal, hidden=hidden)


def runner(method: str, setting: Setting, length: int, kind: Pass, qkv: tuple[Tensor, Tensor, Tensor]) -> Callable[[], object]:
    """The call that a timing repeats."""
    if kind == "forward":
        return _without_gradients(call(method, setting, length, qkv))
    if kind == "decode":
        return _without_gradients(_decoder("softmax" if method == BASELINE else method, setting, length, qkv))
    leaves = [x.detach().requires_grad_() for x in qkv]
    run = call(method, setting, length, (leaves[0], leaves[1], leaves[2]))
    gradient = torch.ones_like(qkv[2])
    return lambda: torch.autograd.grad(run(), leaves, gradient, allow_unused=True)


def seconds(run: Callable[[], object], device: str) -> float:
    """The time of one call; short calls are repeated, and the mean is taken."""
    repeats = 1
    while True:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        _wait(device)
        taken = time.perf_counter() - start
        if taken >= MIN_SECONDS:
            return taken / repeats
        repeats = max(2 * repeats, math.ceil(repeats * 1.2 * MIN_SECONDS / max(taken, 1e-6)))


def peak_bytes(run: Callable[[], Any], device: str) -> tuple[int, Any]:
    """The peak memory that a call allocates, output included, as PyTorch's allocator reports it; and its result."""
    if device != "cpu":
        module: Any = getattr(torch, torch.device(device).type)
        module.synchronize()
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        out = run()
        module.synchronize()
        return int(module.max_memory_allocated() - before), out
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most, out


def error(found: Tensor, exact: Tensor) -> float:
    """|o - softmax's o| / |softmax's o|, in the Frobenius norm."""
    return float((found.float() - exact.float()).norm() / exact.float().norm())


@torch.no_grad()
def saved_error(method: str, setting: Setting, length: int, saved: tuple[Tensor, Tensor, Tensor]) -> float | None:
    """The error on the first `length` tokens of `saved`; None if there are fewer."""
    batch, heads, tokens, channels = saved[0].shape
    if tokens < length:
        return None
    dtype = getattr(torch, setting.dtype)
    query, key, value = (x[:, :, :length].to(setting.device, dtype) for x in saved)
    model_setting = replace(setting, batch=batch, heads=heads, head_dim=channels)
    found, exact = (call(m, model_setting, length, (query, key, value))() for m in (method, BASELINE))
    return error(found, exact)


@torch.no_grad()
def require_agreement(method: str, setting: Setting) -> None:
    """Raise an error if a method is further from its reference in float64 than twice the reference in its own precision."""
    if method == BASELINE:
        return
    mechanism = resolve(method).for_length(CHECKED_LENGTH)
    small = Setting(heads=2, head_dim=setting.head_dim, dtype=setting.dtype, is_causal=setting.is_causal, device=setting.device)
    query, key, value = inputs(small, CHECKED_LENGTH)
    key = query if mechanism.shares_query_and_key else key
    module, hidden = _build(mechanism, small), _hidden(mechanism, small, CHECKED_LENGTH)
    weights = {name: t.detach() for name, t in module.state_dict(keep_vars=True).items()}
    options: dict[str, Any] = {"weights": weights, "is_causal": setting.is_causal}

    def plain(change: Callable[[Tensor], Tensor]) -> Tensor:
        tokens = None if hidden is None else change(hidden)
        return reference.attention(mechanism, change(query), change(key), change(value), hidden=tokens, **options).double()

    exact = plain(Tensor.double)
    found = module(query, key, value, is_causal=setting.is_causal, hidden=hidden).double()
    off, allowed = (found - exact).norm(), 2 * (plain(lambda x: x) - exact).norm()
    if off > allowed:
        raise DisagreementError(
            f"{method} differs from its reference by {off / exact.norm():.1e}, and rounding explains only "
            f"{allowed / exact.norm():.1e}; it is not timed."
        )


def _decoder(method: str, setting: Setting, length: int, qkv: tuple[Tensor, Tensor, Tensor]) -> Callable[[], object]:
    """Decode one token after `length` others; each call continues the state of the one before, which may grow in place."""
    mechanism = resolve(method).for_length(length)
    module = _build(mechanism, setting)
    query, key, value = qkv
    key = query if mechanism.shares_query_and_key else key
    given: dict[str, Any] = {"is_causal": True, "return_state": True}
    with torch.no_grad():
        _, state = module(query, key, value, hidden=_hidden(mechanism, setting, length), **given)
    query, key, value = (x[:, :, :1].clone() for x in qkv)
    key = query if mechanism.shares_query_and_key else key
    hidden = _hidden(mechanism, setting, 1)

    def step() -> None:
        nonlocal state
        _, state = module(query, key, value, state=state, hidden=hidden, **given)

    return step


def _build(mechanism: Mechanism, setting: Setting) -> Any:
    torch.manual_seed(0)
    width = setting.heads * setting.head_dim
    module = mechanism.build(heads=setting.heads, head_dim=setting.head_dim, dim=width).eval()
    return module.to(setting.device, getattr(torch, setting.dtype))


def _hidden(mechanism: Mechanism, setting: Setting, length: int) -> Tensor | None:
    if not mechanism.reads_tokens:
        return None
    width = setting.heads * setting.head_dim
    return torch.zeros(setting.batch, length, width, device=setting.device, dtype=getattr(torch, setting.dtype))


def _without_gradients(run: Callable[[], object]) -> Callable[[], object]:
    def wrapped() -> object:
        with torch.no_grad():
            return run()

    return wrapped


def _wait(device: str) -> None:
    if device != "cpu":
        getattr(torch, torch.device(device).type).synchronize()
