"""The compiled kernels against their PyTorch fallbacks."""

import platform
import shutil
import sys

import pytest
import torch

import subquad as sq
from subquad.engines.convolution import add_convolved
from subquad.ops import dispatch, hugepages, native_library
from subquad.ops.feature_map import FeatureMap, NativeMap
from subquad.ops.kernelized import Inputs, KernelizedRule, native
from subquad.registry import resolve
from tests.kernels import attention, has_kernels

MECHANISMS = [
    sq.Linear(),
    sq.Taylor(),
    sq.Plain(),
    sq.Plain(normalize="none"),
    sq.Efficient(),
    sq.Performer(features=37),
    sq.Performer(kind="hyperbolic", features=20),
    sq.Performer(kind="relu", features=33),
    sq.Performer(kind="favor++", p=0.5, features=24),
    sq.Hedgehog(),
    sq.T2R(features=19),
]
LEARNED = [sq.RFA(features=16, floor=0.2), sq.RFA(features=13, floor=0.2), sq.Hedgehog(), sq.T2R(), sq.T2R(features=19)]
SPARSE = [
    sq.Local(window=9),
    sq.Local(window=60),
    sq.Local(window=4, dilation=3),
    sq.Local(window=500),
    sq.SparseStrided(stride=7),
    sq.SparseFixed(stride=8, summary=2),
    sq.SparseFixed(stride=20, summary=3, heads="split"),
    sq.Longformer(window=9, num_global=3),
    sq.BigBird(block=8),
    sq.BigBird(block=16, window=1, random=2, globals=0),
    sq.Pooled(stride=6, window=5),
]
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
every_sparse_mechanism = pytest.mark.parametrize("mechanism", SPARSE, ids=str)
both_directions = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
needs_compiled = pytest.mark.skipif(native_library.load() is None, reason="the kernels are not compiled here")


@pytest.mark.skipif(platform.machine() != "x86_64" or not sys.platform.startswith("linux"), reason="about x86-64 on Linux")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="no kernels for this processor")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler here")
def test_the_library_is_there_where_it_can_be():
    assert native_library.load() is not None


def test_which_mechanisms_have_compiled_kernels():
    """Those that `make test` runs without them, too."""
    without = {name for name in sq.methods() if not has_kernels(resolve(name))}
    assert without == {"softmax", "svd"}


@needs_compiled
def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch):
    load = native_library.load.__wrapped__
    shutil.copytree(native_library._SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(native_library, "_SOURCES", tmp_path / "csrc")
    assert load() is not None
    (tmp_path / "csrc" / "common" / "vectors.h").write_text("// another")
    with pytest.warns(
        UserWarning, match="was compiled from other sources than those in csrc, so subquad falls back to PyTorch"
    ):
        assert load() is None
    shutil.rmtree(tmp_path / "csrc")  # as in an installed wheel
    assert load() is not None


def tensors(queries, keys, *, heads=4, kv_heads=4, dim=17, value_dim=13, dtype=torch.float64, scale=1.0, seed=0):
    """Query, key, value, and a gradient for the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (2, heads, queries, dim),
        (2, kv_heads, keys, dim),
        (2, kv_heads, keys, value_dim),
        (2, heads, queries, value_dim),
    ]
    q, k, v, grad = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return (q * scale).requires_grad_(), (k * scale).requires_grad_(), v.requires_grad_(), grad


def results(mechanism, q, k, v, grad, **call):
    out = attention(q, k, v, mechanism, **call)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad, materialize_grads=True)


def without_compiled(mechanism, *given, **call):
    with dispatch.disabled():
        return results(mechanism, *given, **call)


def assert_same(found, expected, within=1e-11):
    for name, x, y in zip(("output", "query", "key", "value"), found, expected, strict=True):
        size = 1 + y.abs().max() if y.numel() else 1.0
        torch.testing.assert_close(x, y, rtol=0, atol=float(within * size), msg=lambda found, name=name: f"{name}: {found}")


@needs_compiled
@every_mechanism
@both_directions
@pytest.mark.parametrize("length", [1, 7, 48, 49, 131])
def test_outputs_and_gradients(mechanism, is_causal, length):
    given = tensors(length, length)
    assert_same(results(mechanism, *given, is_causal=is_causal), without_compiled(mechanism, *given, is_causal=is_causal))


@needs_compiled
@every_mechanism
@pytest.mark.parametrize(("queries", "keys"), [(5, 200), (200, 5), (50, 0)])
def test_another_sequence(mechanism, queries, keys):
    given = tensors(queries, keys)
    assert_same(results(mechanism, *given), without_compiled(mechanism, *given))


@needs_compiled
@every_mechanism
@both_directions
def test_one_channel(mechanism, is_causal):
    given = tensors(61, 61, dim=1)
    assert_same(results(mechanism, *given, is_causal=is_causal), without_compiled(mechanism, *given, is_causal=is_causal))


@needs_compiled
@both_directions
def test_quotients_of_numbers_whose_inverse_is_infinite(is_causal):
    q, k, v, _ = (x.detach() for x in tensors(100, 100, dim=16, dtype=torch.float32, scale=30.0))
    with dispatch.disabled():
        expected = sq.attention(q, k, v, "performer", is_causal=is_causal)
    found = sq.attention(q, k, v, "performer", is_causal=is_causal)
    assert torch.equal(found.isfinite(), expected.isfinite())


@needs_compiled
@every_mechanism
@both_directions
def test_pads_shared_heads_and_whole_vectors(mechanism, is_causal):
    q, k, v, grad = tensors(90, 90, kv_heads=2, dim=16, value_dim=32)
    mask = torch.rand(2, 90, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[1, :60] = False
    with torch.no_grad():
        for x in (k, v):
            x.masked_fill_(~mask[:, None, :, None], torch.nan)
    call = {"is_causal": is_causal, "enable_gqa": True, "key_padding_mask": mask}
    found = results(mechanism, q, k, v, grad, **call)
    assert all(x.isfinite().all() for x in found)
    assert_same(found, without_compiled(mechanism, q, k, v, grad, **call))


@needs_compiled
@every_mechanism
@both_directions
def test_large_inputs(mechanism, is_causal):
    """Levels rise by hundreds inside a chunk."""
    given = tensors(150, 150, scale=25.0)
    assert_same(
        results(mechanism, *given, is_causal=is_causal), without_compiled(mechanism, *given, is_causal=is_causal), within=1e-8
    )


@needs_compiled
@pytest.mark.parametrize("mechanism", [*MECHANISMS, *SPARSE], ids=str)
@both_directions
def test_rounding_in_float32(mechanism, is_causal):
    exact = without_compiled(mechanism, *tensors(300, 300, dim=64, value_dim=64), is_causal=is_causal)
    given = tensors(300, 300, dim=64, value_dim=64, dtype=torch.float32)
    errors = [
        [(x.double() - y).norm() for x, y in zip(run(mechanism, *given, is_causal=is_causal), exact, strict=True)]
        for run in (results, without_compiled)
    ]
    assert all(ours <= 2 * theirs for ours, theirs in zip(*errors, strict=True))


@needs_compiled
@every_mechanism
@both_directions
def test_tokens_before_heads(mechanism, is_causal):
    """The memory order of projections; the output has the same order, unless queries are projected once more."""
    given = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors(90, 90)[:3]]
    grad = tensors(90, 90)[3]
    found = results(mechanism, *given, grad, is_causal=is_causal)
    assert found[0].transpose(1, 2).is_contiguous() == (mechanism not in LEARNED)
    assert_same(found, without_compiled(mechanism, *given, grad, is_causal=is_causal))


@needs_compiled
@every_mechanism
@both_directions
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_fewer_sequences_than_threads(mechanism, is_causal, threads):
    """Each sequence is then cut into parts."""
    q, k, v = (torch.randn(1, 1, 1111, 9, dtype=torch.float64) for _ in range(3))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = attention(q, k, v, mechanism, is_causal=is_causal)
    finally:
        torch.set_num_threads(before)
    with dispatch.disabled():
        expected = attention(q, k, v, mechanism, is_causal=is_causal)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@needs_compiled
@every_mechanism
@pytest.mark.parametrize("order", [(True, False), (False, True), (True, True)], ids=str)
def test_a_state_of_one_can_be_continued_by_the_other(mechanism, order):
    q, k, v = (x.detach() for x in tensors(130, 130)[:3])
    with dispatch.disabled():
        whole = attention(q, k, v, mechanism, is_causal=True)
    found, state = [], None
    for piece, is_compiled in zip((slice(0, 77), slice(77, 130)), order, strict=True):
        call = {"is_causal": True, "state": state, "return_state": True}
        parts = [x[:, :, piece] for x in (q, k, v)]
        if is_compiled:
            out, state = attention(*parts, mechanism, **call)
        else:
            with dispatch.disabled():
                out, state = attention(*parts, mechanism, **call)
        found.append(out)
    torch.testing.assert_close(torch.cat(found, 2), whole, rtol=0, atol=1e-11)


@needs_compiled
@every_mechanism
@both_directions
def test_second_derivatives(mechanism, is_causal):
    def second():
        q, k, v, grad = tensors(9, 9, dim=5, value_dim=3)
        out = attention(q, k, v, mechanism, is_causal=is_causal)
        first = torch.autograd.grad(out, (q, k, v), grad.requires_grad_(), create_graph=True)
        return torch.autograd.grad(
            sum(x.square().sum() for x in first), (grad, q, k, v), allow_unused=True, materialize_grads=True
        )

    found = second()
    with dispatch.disabled():
        expected = second()
    assert_same(found, expected)


@needs_compiled
def test_second_derivatives_of_one_tensor_as_query_and_key():
    def second():
        q, _, v, grad = tensors(9, 9, dim=5, value_dim=3)
        (first,) = torch.autograd.grad(sq.attention(q, q, v, "linear"), q, grad, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (q, v))

    found = second()
    with dispatch.disabled():
        expected = second()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@needs_compiled
def test_only_the_gradients_asked_for():
    q, k, v, grad = tensors(20, 20)
    out = sq.attention(q.detach(), k, v.detach(), "linear")
    (found,) = torch.autograd.grad(out, k, grad)
    with dispatch.disabled():
        (expected,) = torch.autograd.grad(sq.attention(q, k, v, "linear"), k, grad)
    torch.testing.assert_close(found, expected)


BUCKETED = [
    (sq.Reformer(chunk=8), 4), (sq.Reformer(), 4),  # one tensor is both query and key
    *((sq.Routing(clusters=5, chunk=8), kv_heads) for kv_heads in (4, 2)),
    *((sq.Routing(clusters=2, chunk=5), kv_heads) for kv_heads in (4, 2)),
]  # fmt: skip


@needs_compiled
@both_directions
@pytest.mark.parametrize(("mechanism", "kv_heads"), BUCKETED, ids=str)
@pytest.mark.parametrize("length", [1, 7, 64, 300])
@pytest.mark.parametrize("has_pads", [False, True], ids=["whole", "padded"])
def test_buckets(mechanism, is_causal, kv_heads, length, has_pads):
    q, k, v, grad = tensors(length, length, kv_heads=kv_heads)
    leaves = (q, k, v)
    if mechanism.shares_query_and_key:
        k, leaves = q, (q, v)
    call = {"is_causal": is_causal, "enable_gqa": kv_heads != 4}
    if has_pads:
        call["key_padding_mask"] = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) > 0.3

    def run():
        out = attention(q, k, v, mechanism, **call)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    found = run()
    with dispatch.disabled():
        expected = run()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


@needs_compiled
@both_directions
@every_sparse_mechanism
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("length", [1, 7, 64, 300])
@pytest.mark.parametrize("has_pads", [False, True], ids=["whole", "padded"])
def test_tiles(mechanism, is_causal, kv_heads, length, has_pads):
    q, k, v, grad = tensors(length, length, kv_heads=kv_heads)
    call = {"is_causal": is_causal, "enable_gqa": kv_heads != 4}
    if has_pads:
        call["key_padding_mask"] = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) > 0.3
    assert_same(results(mechanism, q, k, v, grad, **call), without_compiled(mechanism, q, k, v, grad, **call))


@needs_compiled
@both_directions
@every_sparse_mechanism
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_tiles_of_one_sequence_for_several_threads(mechanism, is_causal, threads):
    q, k, v = (torch.randn(1, 1, 700, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, 1, 700, 16, dtype=torch.float64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = results(mechanism, q, k, v, grad, is_causal=is_causal)
    finally:
        torch.set_num_threads(before)
    assert_same(found, without_compiled(mechanism, q, k, v, grad, is_causal=is_causal))


@needs_compiled
@every_sparse_mechanism
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_is_not_lost(mechanism, where):
    """A NaN in a key or value reaches all queries that attend to it; a NaN in a query reaches its own row only."""
    q, k, v = (x.detach() for x in tensors(300, 300)[:3])
    one = torch.zeros_like(v)
    one[0, 0, 77] = 1
    sees = sq.attention(q, k, one, mechanism)[0, 0, :, 0] != 0
    {"query": q, "key": k, "value": v}[where][0, 0, 77] = torch.nan
    found = attention(q, k, v, mechanism).isnan()[0, 0].any(-1)
    if where == "query":
        assert found.nonzero().flatten().tolist() == [77]
    else:
        assert sees.any()
        assert found[sees].all()


@needs_compiled
@both_directions
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("has_pads", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("mechanism", LEARNED, ids=str)
def test_learned_maps(is_causal, kv_heads, has_pads, mechanism):
    module = mechanism.build(heads=4, kv_heads=kv_heads, head_dim=17).double()
    q, k, v, grad = tensors(130, 130, kv_heads=kv_heads)
    call = {"is_causal": is_causal}
    if has_pads:
        call["key_padding_mask"] = torch.rand(2, 130, generator=torch.Generator().manual_seed(3)) > 0.3

    def run():
        out = module(q, k, v, **call)
        return out.detach(), *torch.autograd.grad(out, (q, k, v, *module.parameters()), grad)

    found = run()
    with dispatch.disabled():
        expected = run()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@needs_compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e3, 1e5, 1e9])
def test_sines_of_large_angles(dtype, size):
    """The sums over one key with the value 1 are the features of that key."""
    angles = torch.randn(1, 1, 1, 501, dtype=dtype, generator=torch.Generator().manual_seed(4)) * size
    feature_map = FeatureMap.symmetric(lambda x: torch.cat([x.sin(), x.cos()], dim=-1), 1002, NativeMap("trigonometric"))
    rule = KernelizedRule(feature_map=feature_map, normalizer="signed", floor=1e-3)
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    inputs = Inputs(angles, angles, one, None, True)
    _, sums, _ = native.forward(inputs, rule, {}, return_sums=True, return_denominators=False)
    expected = torch.cat([angles.sin(), angles.cos()], dim=-1)
    torch.testing.assert_close(sums["S"][..., 0], expected[0], rtol=0, atol=2 * torch.finfo(dtype).eps)


@needs_compiled
@pytest.mark.parametrize("taps", [1, 5, 33])
@pytest.mark.parametrize("length", [1, 3, 40, 131])
@pytest.mark.parametrize(("kv_heads", "dim"), [(4, 8), (2, 13)])
def test_convolution(taps, length, kv_heads, dim):
    generator = torch.Generator().manual_seed(5)
    value = torch.randn(2, kv_heads, length, dim, dtype=torch.float64, generator=generator, requires_grad=True)
    kernel = torch.randn(4, taps, dtype=torch.float64, generator=generator, requires_grad=True)
    grad = torch.randn(2, 4, length, dim, dtype=torch.float64, generator=generator)

    before = torch.randn(2, 4, length, dim, dtype=torch.float64, generator=generator, requires_grad=True)

    def run():
        out = add_convolved(before, value, kernel)
        return out.detach(), *torch.autograd.grad(out, (before, value, kernel), grad)

    found = run()
    with dispatch.disabled():
        expected = run()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(add_convolved(before.clone(), value, kernel), expected[0], rtol=0, atol=1e-11)


def test_everything_runs_without_them(monkeypatch):
    q, k, v, _ = tensors(20, 20)
    expected = sq.attention(q, k, v, "performer", is_causal=True)
    monkeypatch.setattr(native_library, "load", lambda: None)
    torch.testing.assert_close(sq.attention(q, k, v, "performer", is_causal=True), expected)


class _Madvise:
    """Stands for the system call, and keeps the ranges it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append(arguments)


@pytest.fixture
def madvise(monkeypatch):
    advised = _Madvise()
    monkeypatch.setattr(hugepages, "_madvise", lambda: advised)
    return advised


@pytest.mark.parametrize("offset", [0, 3], ids=["whole", "slice"])
def test_huge_pages_are_asked_for_on_the_whole_pages_of_a_large_tensor(madvise, offset):
    x = torch.randn(2**20 + 2048)[offset:]
    expected = x.clone()
    assert hugepages.advise_huge_pages(x) is x
    assert torch.equal(x, expected)
    [(start, length, advice)] = madvise.calls
    assert advice == 14  # MADV_HUGEPAGE
    assert start % 4096 == length % 4096 == 0
    assert 0 <= start - x.data_ptr() < 4096
    assert 0 <= (x.data_ptr() + x.nbytes) - (start + length) < 4096


@pytest.mark.parametrize("x", [torch.empty(2**20 - 1), torch.empty(2**22, device="meta")], ids=["small", "meta"])
def test_no_huge_pages_for_small_tensors_and_those_without_memory(madvise, x):
    assert hugepages.advise_huge_pages(x) is x
    assert not madvise.calls


@needs_compiled
def test_the_output_of_a_compiled_kernel_is_on_huge_pages(madvise):
    q, k, v = torch.randn(3, 1, 1, 2**16, 16).unbind(0)
    out = sq.attention(q, k, v, "linear")
    assert any(start - out.data_ptr() < 4096 and length >= out.nbytes - 8192 for start, length, _ in madvise.calls)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise is a Linux call")
def test_the_system_call_is_found():
    assert hugepages._madvise()(4097, 4096, 14) == -1  # refused: an address inside a page
