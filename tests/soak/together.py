"""Calls from several threads at once, and in a forked process: they must return the same bits as a call on its own.

From threads, results of PyTorch's fused attention may differ by rounding.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import Tensor

from tests.soak.calls import Prepared, equal
from tests.soak.evaluation import is_fused

THREADS = 4


def differs_in_threads(prepared: Prepared) -> str:
    """What is wrong with calls from several threads at once, each with its own tokens, from one state if there is one."""
    p = prepared

    def job(number: int, state: Any = None, start: int = 0) -> Any:
        def roll(x: Tensor | None, dim: int) -> Tensor | None:
            return None if x is None else x.detach().roll(number, dim)

        tensors, options = (
            p.part(start, p.spec.queries, p.options) if state is not None else ((p.q, p.k, p.v, p.hidden), p.options)
        )
        q, k, v, hidden = tensors
        rolled = roll(k, 1), roll(v, 1)
        arguments = (rolled[0] if p.is_shared else roll(q, 1), *rolled, roll(hidden, 0) if p.real is None else hidden)
        more = {} if state is None else {"state": state, "return_state": True}
        with torch.no_grad():
            out = p.call(*arguments, **options, **more)
        return out if state is None else out[0]

    state, start = None, 0
    if p.spec.pieces is not None and len(p.spec.pieces) > 1:
        with torch.no_grad():  # two calls leave spare room in the state
            for length in p.spec.pieces[:-1]:
                tensors, options = p.part(start, start + length, p.options)
                _, state = p.call(*tensors, **options, state=state, return_state=True)
                start += length
    expected = [job(n, None if state is None else state.clone(), start) for n in range(THREADS)]
    found: list[Any] = [None] * THREADS
    barrier = threading.Barrier(THREADS)

    def work(n: int) -> None:
        barrier.wait()
        try:
            found[n] = job(n, state, start)
        except Exception as error:
            found[n] = error

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, (ours, right) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(ours, Tensor):
            return f"thread {n} of {THREADS} raised {ours!r}"
        if not (equal(ours, right) or (is_fused(p) and is_close(ours, right))):
            return f"the result of thread {n} of {THREADS} differs from that of the same call on its own"
    return ""


def is_close(ours: Tensor, right: Tensor) -> bool:
    """Up to rounding: that of PyTorch's fused attention depends on where in memory its tensors are."""
    eps = torch.finfo(right.dtype).eps * (64 if right.dtype.itemsize >= 4 else 4)
    size = right.nan_to_num(0.0, 0.0, 0.0).abs().amax() if right.numel() else 0.0
    return torch.allclose(ours, right, rtol=0, atol=float(eps * size), equal_nan=True)


def differs_in_a_fork(prepared: Prepared) -> str:
    """What is wrong with a call in a forked process, such as the worker of a data loader."""
    with torch.no_grad():
        expected = prepared.output()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reader)
            with torch.no_grad():
                found = prepared.output()
            os.write(writer, b"equal" if equal(found, expected) else b"a result that differs from that of its parent")
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return "" if answer == "equal" else f"a forked process returned {answer or f'no result; its exit status is {status}'}"
