"""Compiled kernels that cannot get the memory they work in: an error, in the process that asked for it."""

import resource
import subprocess
import sys

import pytest
import torch

import subquad as sq
import subquad.ops.tiles
from subquad.engines.convolution import add_convolved
from subquad.errors import OutOfMemoryError
from subquad.ops import bucketed
from subquad.ops.bucketed import Rule
from subquad.ops.clustered import ClusteredInputs
from subquad.ops.clustered import native as clustered
from subquad.ops.feature_map import FeatureMap, NativeMap
from subquad.ops.kernelized import Inputs, KernelizedRule, operator
from subquad.ops.tiles import Tile, TileGroup
from tests.engines.test_native import needs_compiled

WIDE = 400_003  # channels of a few tokens: kernels take scratch memory for many tokens
LEFT = 2**25  # bytes that a process may still take: enough for gradients, but not for scratch memory
KERNELS = {}


def kernel(prepare):
    """`prepare(channels, tokens)` makes tensors and returns a function that passes them to a kernel."""
    KERNELS[prepare.__name__] = prepare
    return prepare


def tensors(tokens, channels, grad=False):
    return [torch.randn(1, 1, tokens, n, requires_grad=grad) for n in (channels, channels, 3)]


@kernel
def tiles(channels, tokens, grad=False):
    q, k, v = tensors(tokens, channels, grad)
    group = TileGroup(q[:, :, None], k, v, [Tile(0, tokens, 1, 0, 0, tokens)])
    return lambda: subquad.ops.tiles.attend([group], tokens, 1.0)[0]


@kernel
def buckets(channels, tokens, grad=False):
    q, k, v = tensors(tokens, channels, grad)
    bucket = torch.zeros(1, 1, 1, tokens, dtype=torch.int64)
    return lambda: bucketed.attend(q, k, v, bucket, bucket, Rule(1, 1, 8, False, False), 1.0)


@kernel
def clusters(channels, tokens):
    q, k, v = tensors(tokens, channels)
    inputs = ClusteredInputs(q, k, v, torch.zeros(1, 1, tokens, dtype=torch.int64), None, None)
    return lambda: clustered.forward(inputs, 1, 2, 1.0)


@kernel
def assignment(channels, tokens):
    x = torch.randn(1, 1, 1, channels).expand(-1, -1, 100 * tokens, -1)
    return lambda: clustered.assign(x, None, 3, 1)


@kernel
def sums(channels, tokens):
    q, k, v = tensors(tokens, channels)
    linear = FeatureMap.symmetric(lambda x: x, channels, NativeMap("elu"))
    inputs, rule = Inputs(q, k, v, None, True), KernelizedRule(feature_map=linear)
    return lambda: operator.attend(inputs, rule, {}, return_sums=False, needs_gradient=False)


@kernel
def convolution(channels, tokens):
    out, value, _ = tensors(4 * tokens, channels)
    weight = torch.randn(1, 3)
    return lambda: add_convolved(out, value, weight)


def limit_memory(left):
    """Let this process take `left` more bytes; None for any number."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most if left is None else now + left, most))


def run_out_of_memory(call):
    """The error of a call for which there is not enough memory."""
    limit_memory(LEFT)
    try:
        with pytest.raises(OutOfMemoryError) as raised:
            call()
    finally:
        limit_memory(None)
    return raised.value


def main():
    torch.set_num_threads(2)
    sums(64, 50_000)()  # starts the threads
    for name, prepare in KERNELS.items():
        print(name, run_out_of_memory(prepare(WIDE, 4)), flush=True)
        if name in ("tiles", "buckets"):
            out = prepare(WIDE, 4, grad=True)()
            print(name, run_out_of_memory(out.sum().backward), flush=True)
        prepare(16, 500)()  # works again


@needs_compiled
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
def test_an_error_instead_of_a_crash():
    command = [sys.executable, "-c", "from tests.engines.test_out_of_memory import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    errors = done.stdout.splitlines()
    assert len(errors) == len(KERNELS) + 2
    assert issubclass(OutOfMemoryError, sq.SubquadError)
    assert issubclass(OutOfMemoryError, MemoryError)
    for error in errors:
        assert "needs memory to work in, and there is not enough; got " in error
        assert error.endswith("Pass a smaller batch or a shorter sequence.")
