"""Part *cases*: random calls of random mechanisms, compared with the reference in float64.

A call is drawn by `drawing`, written as Python by `source`, run here, and judged by `judging`. What `sq.why_not` gives a reason against
must be refused, with a SubquadError. Any other call must be accepted, unless it is invalid or breaks a rule of `BESIDE_THE_RECORD`.
"""

from __future__ import annotations

import resource
import traceback
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import subquad as sq
from subquad.ops import native_library
from tests.soak import FINDINGS, choices, source
from tests.soak.calls import Prepared, kernels, recording, results
from tests.soak.drawing import Spec, draw
from tests.soak.dropout import dropped
from tests.soak.evaluation import Evaluation, decided_by_rounding, is_fused, leaves_range_in_sums, negligible, undecided
from tests.soak.judging import holds_as_a_whole, judge
from tests.soak.shrinking import shrunk
from tests.soak.together import differs_in_a_fork, differs_in_threads

COUNT = 100_000
SECONDS = 300  # routing compiles for more than a minute, longer where other processes run
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
    """How the call ends. What must be refused is not compiled: Dynamo wraps the exception in one of its own."""
    if spec.compiler and may_refuse(spec):
        spec = replace(spec, compiler=None)
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
    if leaves_range_in_sums(prepared):
        return {"verdict": "answered", "labels": {**labels, "range": "no row judged"}}
    turned = (lambda: undecided(prepared, found)) if spec.mechanism in choices.CHOOSING else None
    without_nan = evaluate(torch.float64, without_nan=True) if spec.has_nan_query and not spec.dropout_p else None
    rule = (evaluate, evaluate.precision, turned, without_nan, negligible(prepared))
    judgement = judge(found, *rule)
    if judgement.faults and is_fused(prepared) and not spec.dropout_p:
        with kernels(spec), recording(spec), sdpa_kernel(SDPBackend.MATH):
            unfused = results(prepared, names)
        again = judge(unfused, *rule)
        if again.faults and decided_by_rounding(prepared) and holds_as_a_whole(unfused, evaluate, evaluate.precision):
            again.faults.clear()
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
