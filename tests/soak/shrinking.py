"""Make a failing call smaller, as long as it still fails in the same way. Each attempt runs in a forked process: it may crash, too."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.soak import FINDINGS
from tests.soak.drawing import Spec

ATTEMPT_SECONDS, ALL_SECONDS = 20.0, 60.0
_USUAL = {f.name: f for f in fields(Spec)}


def shrunk(spec: Spec, run: Callable[[Spec], dict[str, Any]]) -> tuple[Spec, dict[str, Any]]:
    """The smallest call found, and how it ends; the same one if it ends well when it is run again."""
    result = attempt(spec, run)
    if result["verdict"] not in FINDINGS:
        return spec, result
    end = time.monotonic() + ALL_SECONDS
    is_smaller = True
    while is_smaller and time.monotonic() < end:
        is_smaller = False
        for candidate in simpler(spec):
            found = attempt(candidate, run)
            if how(found) == how(result):
                spec, result, is_smaller = candidate, found, True
                break
            if time.monotonic() > end:
                break
    return spec, result


def how(result: dict[str, Any]) -> tuple[str, str]:
    return result["verdict"], str(result.get("labels", {}).get("check", ""))


def attempt(spec: Spec, run: Callable[[Spec], dict[str, Any]]) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            faulthandler.disable()  # a crash is expected here
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(json.dumps(run(spec)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    answer, end = b"", time.monotonic() + ATTEMPT_SECONDS
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (piece := os.read(reader, 65536)):
            break
        answer += piece
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    os.waitpid(child, 0)
    try:
        return json.loads(answer)
    except ValueError:
        return {"verdict": "crash", "labels": {"check": "process"}}


def simpler(spec: Spec) -> Iterator[Spec]:
    """Calls with one thing less, the largest steps first."""
    for name in ("compiler", "together", "wrong", "padding", "attn_mask", "scale", "saved_after", "pieces", "has_global_mask"):
        yield from _with(spec, **{name: _USUAL[name].default})
    yield from _with(spec, grad=())
    yield from _with(spec, threads=1)
    yield from _with(spec, has_nan_query=False)
    yield from _with(spec, options={})
    for name in spec.options:
        yield from _with(spec, options={n: value for n, value in spec.options.items() if n != name})
    for what in ("strides", "magnitudes", "spikes"):
        yield from _with(spec, **{what: {}})
        for name in getattr(spec, what):
            yield from _with(spec, **{what: {n: value for n, value in getattr(spec, what).items() if n != name}})
    yield from _with(spec, grad=spec.grad[1:])
    yield from _with(spec, grad=spec.grad[:-1])
    yield from _with(spec, fill="0", fills_queries=False)
    yield from _with(spec, batch=min(spec.batch, 1))
    yield from _with(spec, heads=1, kv_heads=1)
    yield from _with(spec, heads=spec.kv_heads)
    yield from _with(spec, dtype="float64", weights="float64")
    yield from _with(spec, weights="float64" if spec.dtype == "float64" else "float32")
    yield from _with(spec, entry="module")
    for length in _less(spec.queries):
        keys = length if spec.queries == spec.keys else spec.keys
        yield from _with(spec, queries=length, keys=keys, **_pieces(spec, length))
    if spec.queries != spec.keys:
        yield from (found for length in _less(spec.keys) for found in _with(spec, keys=length))
        yield from _with(spec, queries=spec.keys)
    for name in ("dim", "value_dim"):
        yield from (found for size in _less(getattr(spec, name)) if size for found in _with(spec, **{name: size}))


def _with(spec: Spec, **changes: Any) -> Iterator[Spec]:
    changed = replace(spec, **changes)
    if changed.entry == "function" and changed.weights in ("float16", "bfloat16"):
        return  # a function draws its own weights
    if changed != spec:
        yield changed


def _less(size: int) -> list[int]:
    return sorted({n for n in (1, 2, 4, size // 2, size - 1) if 0 <= n < size})


def _pieces(spec: Spec, length: int) -> dict[str, Any]:
    """As few pieces as they have, with the last ones shortened."""
    if spec.pieces is None:
        return {}
    left, pieces = length, []
    for piece in reversed(spec.pieces):
        pieces.append(min(piece, left))
        left -= pieces[-1]
    return {"pieces": tuple(reversed(pieces))}
