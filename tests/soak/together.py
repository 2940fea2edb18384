"""Calls at once in threads, and in a forked process: the same bits as alone."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import Tensor

from tests.soak.calls import Prepared, equal

THREADS = 4


def differs_in_threads(prepared: Prepared) -> str:
    """Threads that call at once, each with tokens of its own, and from one state if there is one: the same bits as one by one."""
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
        with torch.no_grad():  # two calls leave room to spare in the state
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
            return f"thread {n} of {THREADS} raises {ours!r}"
        if not equal(ours, right):
            return f"thread {n} of {THREADS} gets another result than alone"
    return ""


def differs_in_a_fork(prepared: Prepared) -> str:
    """A forked process, as a loader of data has them."""
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
            os.write(writer, b"equal" if equal(found, expected) else b"another result than its parent")
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return "" if answer == "equal" else f"a forked process gets {answer or f'no result, status {status}'}"
