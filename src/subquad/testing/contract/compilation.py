"""Point 13: one graph under torch.compile, with the same numbers, for all batch sizes. Fake and meta tensors work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from subquad.errors import StateError
from subquad.state import State
from subquad.testing.assertions import assert_close
from subquad.testing.cases import BATCH, DIM, HEADS, VALUE_DIM, WIDTH, Case, Inputs, inputs
from subquad.testing.contract.determinism import with_seed
from subquad.testing.contract.selection import Contract, requires, usual_options_only

LENGTH = 70


def is_traceable(case: Case) -> str:
    return case.info.graph_breaks


def has_constant_state(case: Case) -> str:
    """All its tensors have the same shape after every token."""
    return "" if case.info.engine in ("kernelized", "hybrid") else "the state has as many rows as tokens, up to a limit"


def compiled(case: Case, is_causal: bool, backend: str | Callable[..., Any], **sizes: int) -> Callable[..., Any]:
    module = case.build(**sizes)  # type: ignore[arg-type]

    def run(*x: Tensor) -> Any:
        return case.run(Inputs(*x), module, is_causal=is_causal)

    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(run, fullgraph=True, backend=backend)
    return compiled


class Compilation(Contract):
    """13. The module, compiled."""

    @requires(is_traceable)
    @torch.no_grad()
    def test_one_graph_for_all_batch_sizes(self, case: Case) -> None:
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        for is_causal in case.directions if self.has_usual_options(case) else case.directions[-1:]:
            run = compiled(case, is_causal, backend, heads=1)
            graphs.clear()
            for batch in (2, 3, 5):
                # Engines that work in chunks get more than two of them.
                x = inputs(130 if case.info.engine in ("kernelized", "hybrid") else LENGTH, batch=batch, heads=1)
                for t in x:
                    torch._dynamo.mark_dynamic(t, 0)
                assert_close(run(*x), case.run(x, is_causal=is_causal))
            assert len(graphs) == 1

    @usual_options_only
    @requires(is_traceable)
    @torch.no_grad()
    def test_inductor_gives_the_same_numbers(self, case: Case) -> None:
        x, is_causal = inputs(LENGTH, heads=1), case.directions[-1]
        assert_close(compiled(case, is_causal, "inductor", heads=1)(*x), case.run(x, is_causal=is_causal))

    @usual_options_only
    @requires(is_traceable)
    def test_compiled_gradients(self, case: Case) -> None:
        x, is_causal = inputs(LENGTH, heads=1, grad=True), case.directions[-1]
        outs = compiled(case, is_causal, "aot_eager", heads=1)(*x), case.run(x, is_causal=is_causal)
        grads = [torch.autograd.grad(out.square().sum(), [case.query(x), x.key, x.value]) for out in outs]
        for ours, theirs in zip(*grads, strict=True):
            assert_close(ours, theirs)

    @usual_options_only
    @requires(is_traceable, functional=True)
    @torch.no_grad()
    def test_function_compiles(self, case: Case) -> None:
        x, is_causal = inputs(LENGTH), case.directions[-1]
        torch._dynamo.reset()
        real = torch.arange(LENGTH).expand(BATCH, -1) < LENGTH - 9
        for mask in [None] if case.why_not(key_padding_mask=True) else [None, real]:
            options: dict[str, Any] = {"is_causal": is_causal, "key_padding_mask": mask}
            run = torch.compile(lambda *x, o=options: case.function(Inputs(*x), **o), fullgraph=True, backend="eager")
            assert_close(run(*x), case.function(x, **options))

    @usual_options_only
    @requires(is_traceable, decode=True)
    @torch.no_grad()
    def test_compiled_decoding(self, case: Case) -> None:
        """One graph for the prompt, one for its first token and one for all further ones."""
        x, module = inputs(LENGTH, heads=1), case.build(heads=1)

        def step(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, state: State | None) -> Any:
            return case.run(Inputs(query, key, value, hidden), module, is_causal=True, state=state, return_state=True)

        torch._dynamo.reset()
        run: Callable[..., Any] = torch.compile(step, fullgraph=True, backend="eager")
        state, outs = None, []
        for piece in (x.tokens(0, 68), x.tokens(68, 69), x.tokens(69, 70)):
            out, state = run(*piece, state)
            outs.append(out)
        assert_close(torch.cat(outs, dim=2), case.run(x, is_causal=True))

    @usual_options_only
    @requires(is_traceable, has_constant_state, decode=True)
    @pytest.mark.parametrize("donate", [False, True])
    @torch.no_grad()
    def test_one_graph_for_all_positions(self, case: Case, donate: bool) -> None:
        x, module, graphs = inputs(LENGTH, heads=1), case.build(heads=1), []

        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        def step(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, state: State) -> Any:
            given = state.donate() if donate else state
            return case.run(Inputs(query, key, value, hidden), module, is_causal=True, state=given, return_state=True)

        torch._dynamo.reset()
        run: Callable[..., Any] = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
        first = x.tokens(0, LENGTH - 6)
        _, state = case.run(first, is_causal=True, return_state=True)
        outs = []
        for start in range(LENGTH - 6, LENGTH):
            before, (out, state) = state, run(*x.tokens(start, start + 1), state)
            outs.append(out)
            if donate:
                with pytest.raises(StateError, match="was donated"):
                    before.clone()
        assert_close(torch.cat(outs, dim=2), case.run(x, is_causal=True)[:, :, LENGTH - 6 :])
        assert len(graphs) == 1


class FakeTensors(Contract):
    """13. Shapes without numbers."""

    def test_meta_device(self, case: Case) -> None:
        module = case.mechanism.build(heads=HEADS, head_dim=DIM, value_dim=VALUE_DIM, dim=WIDTH).eval().to("meta")
        x = inputs(LENGTH, dtype=torch.float32).map(lambda t: t.to("meta"))
        for is_causal in case.directions:
            out = case.run(x, module, is_causal=is_causal)
            assert out.shape == (BATCH, HEADS, LENGTH, VALUE_DIM)
            assert out.device.type == "meta"

    def test_built_on_the_default_device(self, case: Case) -> None:
        with torch.device("meta"):
            module = case.mechanism.build(heads=HEADS, head_dim=DIM, value_dim=VALUE_DIM, dim=WIDTH)
        assert {t.device.type for t in module.state_dict().values()} <= {"meta"}

    @requires(functional=True)
    @torch.no_grad()
    def test_fake_tensors_neither_use_nor_leave_a_draw(self, case: Case) -> None:
        real, is_causal = inputs(LENGTH), case.directions[-1]
        expected = case.function(real, is_causal=is_causal)
        unseen = Case(with_seed(case, 12345)) if case.info.random else case
        for other in (case, unseen):
            with FakeTensorMode():
                fake = other.function(real.map(lambda t: torch.empty(t.shape, dtype=t.dtype)), is_causal=is_causal)
                assert fake.shape == expected.shape
            assert other.function(real, is_causal=is_causal).isfinite().all()
