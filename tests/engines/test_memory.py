"""Nothing of size N x m x Dv, and no piece of work that grows with N beyond inputs and output."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import subquad as sq
from subquad.engines import kernelized
from subquad.engines.chunk_weights import CHUNK
from tests.harness import every_default


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, forward or backward."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@every_default
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_no_tensor_of_size_n_m_dv(case, is_causal, grad):
    if case.info.engine != "kernelized":
        pytest.skip("about the kernelized engine")
    n, dim, value_dim = 65_536, 16, 16
    module = case.config.build(heads=1, head_dim=dim)
    q, k = (torch.randn(1, 1, n, dim, requires_grad=grad) for _ in range(2))
    v = torch.randn(1, 1, n, value_dim, requires_grad=grad)
    with Largest() as largest, torch.set_grad_enabled(grad):
        out = module(q, k, v, is_causal=is_causal)
        if grad:
            out.sum().backward()
    features = 2 * getattr(case.config, "features", dim)
    # A recorded graph takes the sequence whole: then the features, or the products inside chunks, are the largest.
    piece = n * max(CHUNK, features) if grad else max(kernelized._PIECE, kernelized._ROWS * features) * CHUNK / dim
    assert largest.numel <= piece


PEAK = """
import resource, sys, threading, torch, subquad as sq
N, method, is_causal = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
q, k, v = (torch.randn(1, 1, N, 64) for _ in range(3))
with torch.no_grad():
    sq.attention(q[:, :, :512], k[:, :, :512], v[:, :, :512], method, is_causal=is_causal)  # what the first call loads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = sq.attention(q, k, v, method, is_causal=is_causal)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (4 * out.nbytes))
"""


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", sq.methods(functional=True)[1:])
def test_peak_memory_is_little_more_than_the_output(method, is_causal):
    """In inputs and output as the unit: the output itself is 0.25 of it."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "200000", method, str(is_causal)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 0.5
