"""The contract over every built-in mechanism, and what some of them keep besides."""

import pytest
import torch

import subquad as sq
from subquad.ops.clustered import rows
from subquad.ops.hybrid import pytorch as hybrid
from subquad.ops.kernelized import pytorch
from subquad.ops.tiles import pytorch as tiles
from subquad.testing import MechanismContract
from subquad.testing.contract import Oracle
from subquad.testing.contract.decoding import feed
from tests.harness import CASES, assert_close, inputs

MECHANISMS = [case.mechanism for case in CASES]
IN_CHUNKS = [case for case in CASES if case.info.engine in ("kernelized", "hybrid") and not case.why_not(decode=True)]
in_chunks = pytest.mark.parametrize("case", IN_CHUNKS, ids=lambda case: case.name)


class TestContract(MechanismContract):
    mechanisms = MECHANISMS


class TestManyPieces(Oracle):
    """Engines divide long inputs into pieces; here they divide short ones, too."""

    mechanisms = MECHANISMS

    @pytest.fixture(autouse=True)
    def many_pieces(self, monkeypatch):
        monkeypatch.setattr(pytorch, "_PIECE_FEATURES", 1)
        monkeypatch.setattr(pytorch, "_MIN_PIECE_ROWS", 1)
        monkeypatch.setattr(tiles, "_PIECE", 1)
        monkeypatch.setattr(rows, "_PIECE", 1)
        monkeypatch.setattr(hybrid, "_PIECE_PAIRS", 1)
        monkeypatch.setattr(hybrid, "_SHORT", 0)


@in_chunks
@torch.no_grad()
def test_a_nan_in_a_later_key_stays_there(case):
    """For the others, PyTorch's choice of a kernel decides."""
    x = inputs(100)
    x.key[:, :, 50] = torch.nan
    assert case.run(x, is_causal=True)[:, :, :50].isfinite().all()


@in_chunks
@torch.no_grad()
def test_the_size_of_the_state_is_constant(case):
    sizes = [feed(case, inputs(n), [n])[1].nbytes for n in (1, 10, 1000)]
    assert sizes[0] == sizes[1] == sizes[2] > 0


@torch.no_grad()
def test_softmax_takes_any_length_under_dynamic_shapes():
    """With a kernelized mechanism a new length unrolls other chunks, so it is a new graph."""
    torch._dynamo.reset()
    run = torch.compile(lambda q, k, v: sq.attention(q, k, v, is_causal=True), fullgraph=True, dynamic=True, backend="eager")
    for length in (70, 33, 1):
        x = inputs(length)
        assert_close(run(x.query, x.key, x.value), sq.attention(x.query, x.key, x.value, is_causal=True))
