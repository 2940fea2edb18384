"""No tensor of size N x m x Dv, and no working memory that grows with N beyond inputs and output."""

import pytest
import torch
from benchmarks.engines import memory

import subquad as sq
from subquad.ops.kernelized import pytorch as kernelized
from subquad.ops.kernelized.chunk_weights import CHUNK
from tests.harness import DEFAULTS, Largest


@pytest.mark.parametrize("case", [case for case in DEFAULTS if case.info.engine == "kernelized"], ids=lambda case: case.name)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_no_tensor_of_size_n_m_dv(case, is_causal, grad):
    n, dim, value_dim = 65_536, 16, 16
    module = case.mechanism.build(heads=1, head_dim=dim)
    q, k = (torch.randn(1, 1, n, dim, requires_grad=grad) for _ in range(2))
    v = torch.randn(1, 1, n, value_dim, requires_grad=grad)
    with Largest() as largest, torch.set_grad_enabled(grad):
        out = module(q, k, v, is_causal=is_causal)
        if grad:
            out.sum().backward()
    directions = getattr(case.mechanism, "features", dim)
    features = 2 * directions
    # With gradients the sequence is processed in one piece, and the features or the products inside chunks are the largest
    # tensors. Without, a piece has a fixed number of features: the fewer features a token has, the more tokens per piece.
    rows = max(kernelized._PIECE_FEATURES, kernelized._MIN_PIECE_ROWS * features) / min(dim, directions)
    piece = n * max(CHUNK, features) if grad else rows * CHUNK
    assert largest.numel <= piece


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", [name for name in sq.methods(functional=True) if sq.info(name).engine == "kernelized"])
def test_peak_memory_is_little_more_than_the_output(method, is_causal):
    """As a fraction of the size of inputs and output; the output alone is 0.25."""
    assert memory(method, 200_000, is_causal)["peak_over_inputs_and_output"] < 0.5
