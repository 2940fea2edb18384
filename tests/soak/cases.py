"""Part *cases*: random calls of random mechanisms, compared with the reference in float64.

A call is drawn by `drawing`, written as Python by `source`, run here, and judged by `judging`. What the mechanism's record refuses must be
refused, with a SubquadError; nothing else may be.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import threading
import traceback
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import subquad as sq
from subquad import reference
from subquad.ops import dispatch, native_library
from tests.soak import FINDINGS, choices, source
from tests.soak.drawing import Spec, draw
from tests.soak.judging import EDGE, RandomRounding, Results, judge
from tests.soak.shrinking import shrunk

COUNT = 100_000
SECONDS = 60
THREADS = 4
UNITS = 2.0  # compiled code takes other steps than the reference: sums in parts, a product for a division, its own exponential
FUSED_UNITS = 20.0  # the exponential of PyTorch's fused attention in float32 is right to 20 units in the last place (`exp_u20`)
MEMORY = 12 * 2**30  # of a worker: a call that asks for more fails here, and does not take the machine down


def run_case(seed, index, folder):
    limit_memory()
    return run(draw(seed, index))


@cache
def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))


def explain(seed, index):
    return explained(draw(seed, index))


def explained(spec: Spec) -> dict[str, Any]:
    return {"labels": labels_of(spec), "reproduction": source.script(spec, "forward")}


def shrink(seed, index, folder):
    limit_memory()
    return shrunk_script(draw(seed, index))


def shrunk_script(spec: Spec) -> str:
    spec, result = shrunk(spec, run)
    if result["verdict"] not in FINDINGS:
        return f"# Ends well when it is run alone: it depends on earlier cases, or on chance.\n{source.script(spec, 'forward')}"
    return source.script(spec, result.get("labels", {}).get("check", "forward"))


def run(spec: Spec) -> dict[str, Any]:
    """How the call ends."""
    labels = labels_of(spec)
    default_dtype = torch.get_default_dtype()
    try:
        result = _run(spec, labels)
    except sq.SubquadError as refusal:
        result = {"verdict": "refused", "labels": {**labels, "error": type(refusal).__name__}, "error": str(refusal)}
        if not may_refuse(spec):
            result["verdict"], result["labels"]["check"] = "wrong", "refusal"
    except Exception as error:
        check = type(error).__name__
        result = {"verdict": "foreign error", "labels": {**labels, "check": check}, "error": traceback.format_exc()}
    finally:
        torch.set_default_dtype(default_dtype)
        torch.set_num_threads(1)
    if result["verdict"] not in ("answered", "refused"):
        result["reproduction"] = source.script(spec, result["labels"].get("check", ""))
    return result


def labels_of(spec: Spec) -> dict[str, Any]:
    strides = sorted({kind for kind, _ in spec.strides.values()}) or ["contiguous"]
    states = "whole" if spec.pieces is None else "in pieces" if spec.saved_after is None else "saved and loaded"
    return {
        "mechanism": spec.mechanism,
        "dtype": spec.dtype,
        "stride": strides,
        "padding": spec.padding or "none",
        "compiled": spec.compiler or "no",
        "tokens": states,
        "gradients": "yes" if spec.grad else "no",
        "together": spec.together or (f"{spec.threads} OpenMP threads" if spec.threads > 1 else "alone"),
        "kernels": "compiled" if spec.is_native and native_library.load() is not None else "PyTorch",
    }


def may_refuse(spec: Spec) -> bool:
    """Whether the call is wrong, or something that the options or the record do not support."""
    if source.is_wrong(spec):
        return True
    try:
        mechanism = type(sq.registry.resolve(spec.mechanism))(**spec.options)
    except sq.SubquadError:
        return True
    if sq.why_not(mechanism, **spec.needs):
        return True
    return any(refuses(spec, mechanism) for refuses in BESIDE_THE_RECORD)


# What depends on numbers or on two needs together, and therefore cannot stand in a record.
BESIDE_THE_RECORD = (
    lambda spec, m: m.info.name in ("performer", "hedgehog", "t2r", "hybrid") and spec.scale is not None and spec.scale <= 0,
    lambda spec, m: m.info.name == "linformer" and spec.keys > m.max_length,
    lambda spec, m: m.info.name == "longformer" and isinstance(m.dilation, tuple) and len(m.dilation) != spec.heads,
    lambda spec, m: m.info.name == "longformer" and spec.has_global_mask and spec.pieces is not None,
    lambda spec, m: m.shares_query_and_key and spec.queries != spec.keys,
)


@dataclass
class Prepared:
    """The call's tensors, from the text of `source.inputs`."""

    spec: Spec
    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor | None
    mechanism: Any
    module: Any
    options: dict[str, Any]
    target: Tensor

    @classmethod
    def of(cls, spec: Spec) -> Prepared:
        names: dict[str, Any] = {"torch": torch, "sq": sq}
        exec(compile(source.inputs(spec), "<case>", "exec"), names)
        return cls(spec, **{name: names[name] for name in cls.__dataclass_fields__ if name != "spec"})

    @property
    def dtype(self) -> torch.dtype:
        return self.v.dtype

    @property
    def real(self) -> Tensor | None:
        return self.options.get("key_padding_mask")

    @property
    def is_shared(self) -> bool:
        return self.q is self.k

    @property
    def has_dirty_queries(self) -> bool:
        return self.real is not None and self.spec.fills_queries and self.spec.fill != "0"

    def take_gradients(self) -> list[str]:
        """Make the chosen tensors leaves; their names."""
        names = [x for x in ("q", "k", "v", "hidden") if x in self.spec.grad and getattr(self, x) is not None]
        is_shared = self.is_shared
        if is_shared and "q" in names:
            names = ["k", *(x for x in names if x not in ("q", "k"))]
        for name in names:
            setattr(self, name, getattr(self, name).detach().requires_grad_())
        if is_shared:
            self.q = self.k
        self.module.requires_grad_("weights" in self.spec.grad)
        return names

    def call(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, **options: Any) -> Any:
        if self.spec.entry == "function":
            return sq.attention(q, k, v, self.mechanism, enable_gqa=self.spec.heads != self.spec.kv_heads, **options)
        return self.module(q, k, v, hidden=hidden, **options)

    def part(self, start: int, end: int, options: dict[str, Any]) -> tuple[list[Tensor | None], dict[str, Any]]:
        """The arguments for tokens `start` to `end`."""
        i = slice(start, end)
        q, k, v = self.q[:, :, i], self.k[:, :, i], self.v[:, :, i]
        hidden = None if self.hidden is None else self.hidden[:, i]
        masks = {name: x[:, i] for name, x in options.items() if name in ("key_padding_mask", "global_mask")}
        return [k if self.is_shared else q, k, v, hidden], {**options, **masks}

    def output(self) -> Tensor:
        """All at once, or in pieces."""
        if self.spec.pieces is None:
            return self.call(self.q, self.k, self.v, self.hidden, **self.options)
        state, outs, start = None, [], 0
        for number, length in enumerate(self.spec.pieces):
            tensors, options = self.part(start, start + length, self.options)
            out, state = self.call(*tensors, **options, state=state, return_state=True)
            if number == self.spec.saved_after:
                state = saved_and_loaded(state)
            outs.append(out)
            start += length
        return torch.cat(outs, dim=2)

    def weights(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}


def saved_and_loaded(state: sq.State) -> sq.State:
    """Through a file, and with its rows in another order and back."""
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    state = sq.State.from_state_dict(torch.load(file, weights_only=True))
    order = torch.arange(state.batch).flip(0)
    return state.reorder(order).reorder(order)


def _run(spec: Spec, labels: dict[str, Any]) -> dict[str, Any]:
    prepared = Prepared.of(spec)
    torch.set_num_threads(spec.threads)
    names = prepared.take_gradients()
    with kernels(spec), recording(spec):
        if spec.dropout_p:
            found, evaluate, fault = dropped(prepared)
        else:
            found, fault = results(prepared, names), ""
            evaluate = Evaluation(prepared, names)
        if spec.together is not None:
            fault = fault or (differs_in_threads if spec.together == "threads" else differs_in_a_fork)(prepared)
    labels = dict(labels)
    if sq.why_not(prepared.mechanism, **spec.needs) or source.is_wrong(spec):
        return {"verdict": "wrong", "labels": {**labels, "check": "accepted"}, "error": "answered what it must refuse"}
    if fault:
        return {"verdict": "wrong", "labels": {**labels, "check": spec.together or "dropout"}, "error": fault}
    if overflows_in_sums(prepared):
        return {"verdict": "answered", "labels": {**labels, "range": "no row judged"}}
    turned = (lambda: undecided(prepared, found)) if spec.mechanism in choices.CHOOSING else None
    without_nan = evaluate(torch.float64, without_nan=True) if spec.has_nan_query and not spec.dropout_p else None
    rule = (evaluate, evaluate.precision, turned, without_nan, negligible(prepared))
    judgement = judge(found, *rule)
    if judgement.faults and is_fused(prepared) and not spec.dropout_p:
        with kernels(spec), recording(spec), sdpa_kernel(SDPBackend.MATH):
            again = judge(results(prepared, names), *rule)
        if not again.faults:  # only with PyTorch's fused kernel
            judgement, labels["fused attention"] = again, "PyTorch's is wrong"
    if judgement.faults:
        labels["check"] = judgement.check
        return {"verdict": "wrong", "labels": labels, "error": "\n".join(judgement.faults)}
    share = judgement.beyond / max(judgement.rows, 1)
    labels["range"] = "all rows judged" if not share else "no row judged" if share == 1 else "some rows beyond the range"
    if judgement.flips:
        labels["hash flip"] = "yes"
    return {"verdict": "answered", "labels": labels}


def kernels(spec: Spec) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if spec.is_native else dispatch.disabled()


def recording(spec: Spec) -> contextlib.AbstractContextManager[object]:
    """Without gradients: one of the three ways to say so."""
    if spec.grad or spec.compiler or spec.together:
        return contextlib.nullcontext()
    return (contextlib.nullcontext, torch.no_grad, torch.inference_mode)[spec.tensor_seed % 3]()


def results(prepared: Prepared, names: list[str]) -> Results:
    """The output, and the gradients of `names` and of the weights."""
    out = compiled(prepared) if prepared.spec.compiler else prepared.output()
    return {"out": cleaned(prepared, out), **gradients(prepared, out, names)}


def gradients(prepared: Prepared, out: Tensor, names: list[str]) -> Results:
    wrt = {name: getattr(prepared, name) for name in names}
    if "weights" in prepared.spec.grad:
        wrt |= dict(prepared.module.named_parameters())
    return taken(out, wrt, prepared.target)


def taken(out: Tensor, wrt: dict[str, Tensor], target: Tensor) -> Results:
    if not wrt or not out.requires_grad:
        return {name: torch.zeros_like(x) for name, x in wrt.items()}
    grads = torch.autograd.grad(out, list(wrt.values()), target, allow_unused=True)
    return {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(wrt.items(), grads, strict=True)}


def cleaned(prepared: Prepared, out: Tensor) -> Tensor:
    """Without the rows of queries that hold garbage."""
    return out.masked_fill(~prepared.real[:, None, :, None], 0) if prepared.has_dirty_queries else out


def compiled(prepared: Prepared) -> Tensor:
    torch._dynamo.reset()
    is_one_graph = not prepared.mechanism.info.graph_breaks and not prepared.spec.has_global_mask

    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        return prepared.call(k if prepared.is_shared else q, k, v, hidden, **prepared.options)

    return torch.compile(run, backend=prepared.spec.compiler, fullgraph=is_one_graph)(
        prepared.q, prepared.k, prepared.v, prepared.hidden
    )


def is_fused(prepared: Prepared) -> bool:
    """Whether PyTorch's fused attention takes part."""
    engine, spec = prepared.mechanism.info.engine, prepared.spec
    has_global_rows = getattr(prepared.mechanism, "global_projections", False)
    return engine in ("dense", "low_rank") or (
        engine in ("block_sparse", "bucketed") and (spec.pieces is not None or has_global_rows)
    )


class Evaluation:
    """The reference on the same numbers, with zeros in pads, in a precision of choice."""

    def __init__(self, prepared: Prepared, names: list[str], value: Tensor | None = None) -> None:
        self.prepared, self.names, self.value = prepared, names, value
        is_half = prepared.dtype.itemsize < 4
        # A choice is made in the precision of the sums, so that is where the reference must make it, too.
        self.precision = torch.float32 if is_half and prepared.spec.mechanism in choices.CHOOSING else prepared.dtype
        self.units = FUSED_UNITS if self.precision == torch.float32 and is_fused(prepared) else UNITS

    def __call__(self, dtype: torch.dtype, seed: int | None = None, without_nan: bool = False) -> Results:
        p = self.prepared
        tensors = {"q": p.q, "k": p.k, "v": p.v if self.value is None else self.value, "hidden": p.hidden}
        if p.has_dirty_queries:
            tensors["q"] = p.q.masked_fill(~p.real[:, None, :, None], 0)
        if without_nan:
            tensors["q"] = p.q.nan_to_num(0.0)
        tensors = {name: None if x is None else x.detach().to(dtype, copy=True) for name, x in tensors.items()}
        if p.is_shared:
            tensors["q"] = tensors["k"]
        weights = {n: w.detach().to(dtype) if w.is_floating_point() else w for n, w in p.weights().items()}
        wrt = {name: tensors[name].requires_grad_() for name in self.names}
        if "weights" in p.spec.grad:
            wrt |= {name: weights[name].requires_grad_() for name, _ in p.module.named_parameters()}
        options = {n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in p.options.items()}
        options.pop("dropout_p", None)
        with RandomRounding(seed, self.units) if seed is not None else contextlib.nullcontext():
            out = reference.attention(
                p.mechanism, tensors["q"], tensors["k"], tensors["v"], weights=weights, hidden=tensors["hidden"], **options
            )
            grads = taken(out, wrt, p.target.to(dtype))
        found = {"out": cleaned(p, out), **grads}
        # The result is rounded to the precision of the call, whatever it was computed in.
        return {name: x if dtype == torch.float64 else x.to(p.dtype) for name, x in found.items()}


def undecided(prepared: Prepared, found: Results) -> Results:
    """By result, the rows that depend on a choice within rounding."""
    p = prepared
    scale = p.options.get("scale")
    q, k = p.q.detach().double(), p.k.detach().double()
    if p.real is not None:
        k = k.masked_fill(~p.real[:, None, :, None], 0)
        q = q.masked_fill(~p.real[:, None, :, None], 0) if q.shape[2] == k.shape[2] else q
    eps = torch.finfo(torch.promote_types(p.dtype, torch.float32)).eps
    close = choices.undecided(p.mechanism, q, k if scale is None else k * scale, p.real, p.weights(), eps)  # (B, H)
    grouped = close.unflatten(1, (p.spec.kv_heads, -1)).any(2)  # (B, K)
    rows = {"out": close, "q": close, "k": close if p.is_shared else grouped, "v": grouped}
    return {
        name: (rows[name].unsqueeze(-1) if name in rows else close.any()).expand(x.shape[:-1] if x.dim() else (1,)[:0])
        for name, x in found.items()
    }


def size_of(x: Tensor, real: Tensor | None) -> float:
    """The largest number of real tokens."""
    if real is not None and x.shape[2] == real.shape[1]:
        x = x.masked_fill(~real[:, None, :, None], 0)
    return float(x.detach().double().nan_to_num(0.0).abs().amax()) if x.numel() else 0.0


def overflows_in_sums(prepared: Prepared) -> bool:
    """Whether sum_j phi(k_j) v_j^T, which the mechanism computes first, is out of the range, though the output may not be."""
    p = prepared
    sums = size_of(p.k, p.real) * size_of(p.v, p.real) * p.spec.keys
    return p.mechanism.info.engine == "kernelized" and p.dtype != torch.float64 and sums > EDGE


def negligible(prepared: Prepared) -> dict[str, float]:
    """What is zero but for rounding, for the gradients in which terms cancel: those of the size of dO v, times the other side."""
    p = prepared
    eps = torch.finfo(torch.promote_types(p.dtype, torch.float32)).eps
    q, k, v, dO = (size_of(x, p.real) for x in (p.q, p.k, p.v, p.target))
    terms = 8 * eps * dO * v * p.spec.value_dim
    sizes = {"q": max(1.0, k), "k": max(1.0, q, k if p.is_shared else 0.0)}
    others = {name: max(1.0, q, k) * p.spec.queries for name, _ in p.module.named_parameters()}
    return {name: terms * size for name, size in {**sizes, **others, "hidden": p.spec.queries}.items()}


def dropped(prepared: Prepared) -> tuple[Results, Any, str]:
    """With the identity as values the output is the weights: each must be dropped, or be divided by 1 - p."""
    p, keys = prepared.spec.dropout_p, prepared.spec.keys
    value = torch.eye(keys, dtype=prepared.dtype).expand(*prepared.v.shape[:2], -1, -1)

    def weights() -> Tensor:
        torch.manual_seed(prepared.spec.tensor_seed)
        return cleaned(prepared, prepared.call(prepared.q, prepared.k, value, prepared.hidden, **prepared.options))

    found = weights()
    is_dropped = found == 0
    plain = Evaluation(prepared, [], value)

    def evaluate(dtype: torch.dtype, seed: int | None = None) -> Results:
        return {"out": torch.where(is_dropped, 0, plain(dtype, seed)["out"] / (1 - p))}

    evaluate.precision = plain.precision
    fault = "" if equal(found, weights()) else "the same seed drops other weights"
    truth = plain(torch.float64)["out"]
    real = truth > 1e-3
    count, expected = int((is_dropped & real).sum()), float(real.sum()) * p
    if abs(count - expected) > 7 * (expected * (1 - p)) ** 0.5 + 1:
        fault = f"{count} weights of {int(real.sum())} are dropped; expected about {expected:.0f}"
    return {"out": found}, evaluate, fault


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


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
