"""A drawn call, ready to run: its tensors, and what running it gives, in every way to run it."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import subquad as sq
from subquad.ops import dispatch
from tests.soak import source
from tests.soak.drawing import Spec
from tests.soak.judging import Results


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


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
