import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

import subquad as sq
from subquad.growing_tensor import GrowingTensor


def call(method, x, state=None):
    return sq.attention(x, x, x, method, is_causal=True, state=state, return_state=True)


def test_growing_appends_in_place_where_nobody_reads():
    first = GrowingTensor(torch.zeros(1, 0, 3)).append(torch.ones(1, 4, 3), recorded=False)
    second = first.append(torch.full((1, 2, 3), 2.0), recorded=False)
    assert second.rows.data_ptr() == first.rows.data_ptr()
    assert second.rows[0, :, 0].tolist() == [1, 1, 1, 1, 2, 2]
    other = first.append(torch.full((1, 1, 3), 5.0), recorded=False)
    assert other.rows.data_ptr() != first.rows.data_ptr()
    assert second.rows[0, :, 0].tolist() == [1, 1, 1, 1, 2, 2]
    assert other.rows[0, :, 0].tolist() == [1, 1, 1, 1, 5]


def test_growing_does_not_write_into_what_it_was_given():
    given = torch.zeros(1, 8, 3)
    GrowingTensor(given.narrow(1, 0, 4)).append(torch.ones(1, 2, 3), recorded=False)
    assert (given == 0).all()


@pytest.mark.parametrize("method", sq.methods(is_causal=True, decode=True, functional=True))
def test_a_state_of_no_tokens_can_be_read_and_continued_in_any_grad_mode(method):
    method = sq.registry.resolve(method).for_length(8)
    none, some = torch.randn(1, 2, 0, 4), torch.randn(1, 2, 5, 4)
    with torch.no_grad():
        _, state = call(method, none.clone().requires_grad_())
    state = call(method, none, state)[1].clone()
    found, _ = call(method, some, state)
    torch.testing.assert_close(found, call(method, some)[0])


def test_a_cache_does_not_alias_the_callers_tensors():
    x = torch.randn(1, 2, 5, 3)
    kept = x.clone()
    _, state = call("softmax", x)
    x.zero_()
    new = torch.randn(1, 2, 1, 3)
    out, _ = call("softmax", new, state)
    whole, _ = call("softmax", torch.cat([kept, new], dim=2))
    torch.testing.assert_close(out, whole[:, :, -1:])


def test_a_state_from_inference_mode_can_be_continued_outside_it():
    x = torch.randn(1, 2, 5, 3)
    for method in ("softmax", "linear"):
        with torch.inference_mode():
            _, state = call(method, x)
        out, _ = call(method, x[:, :, :1].clone(), state)
        assert out.isfinite().all()


def test_appending_copies_seldom():
    state, moves, seen = None, 0, None
    for _ in range(200):
        _, state = call("softmax", torch.randn(1, 1, 1, 4), state)
        moves += state.tensors["key"].rows.data_ptr() != seen
        seen = state.tensors["key"].rows.data_ptr()
    assert moves < 15


THREADS = 8


@pytest.fixture
def at_once():
    """Calls a function for each item, all at once, and returns the results; threads take turns as often as they can."""
    start, interval = Barrier(THREADS), sys.getswitchinterval()

    def run(function, items):
        def together(item):
            start.wait()
            return function(item)

        return list(pool.map(together, items))

    with ThreadPoolExecutor(THREADS) as pool:
        sys.setswitchinterval(1e-6)
        yield run
        sys.setswitchinterval(interval)


def test_rows_are_claimed_before_they_are_written(monkeypatch):
    first = GrowingTensor(torch.zeros(1, 0, 3)).append(torch.ones(1, 4, 3), recorded=False)
    copy, others = torch.Tensor.copy_, []

    def slow_copy(self, source):
        """Meanwhile, somebody else appends."""
        if not others:
            others.append(None)
            others[0] = first.append(torch.full((1, 1, 3), 5.0), recorded=False)
        return copy(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", slow_copy)
    second = first.append(torch.full((1, 1, 3), 2.0), recorded=False)
    assert second.rows[0, :, 0].tolist() == [1, 1, 1, 1, 2]
    assert others[0].rows[0, :, 0].tolist() == [1, 1, 1, 1, 5]


def test_threads_that_append_to_one_tensor_get_rows_of_their_own(at_once):
    for _ in range(200):
        first = GrowingTensor(torch.zeros(1, 0, 2**14)).append(torch.full((1, 4, 2**14), -1.0), recorded=False)
        grown = at_once(
            lambda i, first=first: first.append(torch.full((1, 2, 2**14), float(i)), recorded=False), range(THREADS)
        )
        assert [t.rows[0, :, 0].tolist() for t in grown] == [[-1.0] * 4 + [i] * 2 for i in range(THREADS)]


@pytest.mark.parametrize(
    "method", ["softmax", sq.Local(window=5), sq.Pooled(stride=3, window=2), sq.Routing(clusters=3, chunk=4)]
)
@torch.no_grad()
def test_threads_that_continue_one_state_do_not_disturb_each_other(method, at_once):
    prompt, tokens = torch.randn(1, 4, 40, 64), torch.randn(THREADS, 1, 4, 5, 64)
    whole = torch.stack([call(method, torch.cat([prompt, x], dim=2))[0][:, :, 40:] for x in tokens])
    for _ in range(60):
        _, state = call(method, prompt[:, :, :30])
        _, state = call(method, prompt[:, :, 30:], state)  # with room for more rows
        found = at_once(lambda x, state=state: call(method, x, state)[0], tokens)
        torch.testing.assert_close(torch.stack(found), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "index", [torch.tensor([0, 2]), torch.tensor([-1]), torch.tensor([0.0]), torch.tensor([[0]]), [1, 0], 1]
)
def test_reorder_refuses(index):
    _, state = call("linear", torch.randn(2, 1, 3, 4))
    with pytest.raises(sq.StateError, match="index must"):
        state.reorder(index)


def test_from_state_dict_refuses_what_is_not_one():
    _, state = call("linear", torch.randn(2, 1, 3, 4))
    for saved in ({"method": "linear"}, None, {**state.state_dict(), "parts": {}}, {**state.state_dict(), "parts": None}):
        with pytest.raises(sq.StateError, match="a saved state must have the entries"):
            sq.State.from_state_dict(saved)


@pytest.mark.parametrize("device", ["nonsense", torch.float16, 1.5])
def test_to_takes_only_a_device(device):
    _, state = call("linear", torch.randn(2, 1, 3, 4))
    with pytest.raises(sq.StateError, match="device must be a device such as"):
        state.to(device)


def test_decoding_with_gradients_of_the_query_alone():
    q, k, v = torch.randn(3, 1, 1, 5, 8).unbind(0)
    q.requires_grad_()
    whole = torch.autograd.grad(sq.attention(q, k, v, is_causal=True).square().sum(), q)[0]
    first, state = sq.attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], is_causal=True, return_state=True)
    last, _ = sq.attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], is_causal=True, state=state, return_state=True)
    pieces = torch.autograd.grad(first.square().sum() + last.square().sum(), q)[0]
    torch.testing.assert_close(pieces, whole)


@pytest.mark.parametrize("method", ["softmax", "plain", "performer"])
def test_another_scale_may_not_continue(method):
    x = torch.randn(1, 1, 3, 4)
    for first, second in ((0.1, 2.0), (None, 2.0), (2.0, None)):
        _, state = sq.attention(x, x, x, method, is_causal=True, scale=first, return_state=True)
        with pytest.raises(sq.StateError, match="by the method that made it"):
            sq.attention(x, x, x, method, is_causal=True, scale=second, state=state)


@torch.no_grad()
def test_state_dict_copies_the_rows_and_not_the_room():
    _, state = call("softmax", torch.randn(1, 1, 100, 4))
    saved = state.state_dict()["tensors"]["key"]
    kept = saved.clone()
    assert saved.untyped_storage().nbytes() == saved.nbytes
    state.tensors["key"].rows.zero_()
    assert torch.equal(saved, kept)


def test_growing_with_gradients_leaves_the_state_without_them():
    _, state = call("softmax", torch.randn(1, 2, 5, 3))
    out, after = call("softmax", torch.randn(1, 2, 1, 3, requires_grad=True), state)
    assert not state.tensors["key"].rows.requires_grad
    call("softmax", torch.randn(1, 2, 1, 3), after)
    out.sum().backward()


def test_detach():
    x = torch.randn(1, 2, 5, 3, requires_grad=True)
    for method in ("softmax", "linear"):
        _, state = call(method, x)
        out, _ = call(method, torch.randn(1, 2, 1, 3), state.detach())
        assert not out.requires_grad


def test_bytes_of_a_linear_state():
    _, state = call("linear", torch.randn(2, 3, 50, 8))
    assert state.nbytes == 2 * 3 * 8 * (8 + 1) * 4


def small_state():
    q = torch.randn(2, 1, 3, 4)
    return sq.attention(q, q, q, "linear", is_causal=True, return_state=True)[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_a_device_that_is_not_there():
    with pytest.raises(sq.StateError, match="the state cannot be moved to cuda: "):
        small_state().to("cuda")


@pytest.mark.parametrize("index", [torch.tensor([0]).to_sparse(), torch.tensor([0], device="meta")], ids=["sparse", "meta"])
def test_rows_must_be_listed_in_a_dense_tensor(index):
    with pytest.raises(sq.StateError, match="index must be a dense 1-D int32 or int64 tensor"):
        small_state().reorder(index)


@pytest.mark.parametrize("tensors", [{}, None])
def test_a_state_of_nothing_says_so(tensors):
    state = sq.State(method="linear", kv_heads=1, head_dim=1, value_dim=1, dtype=torch.float32, length=0, tensors=tensors)
    with pytest.raises(sq.StateError, match="tensors of a state"):
        _ = state.batch


def test_what_a_file_says_is_shown_escaped_and_shortened():
    saved = {**small_state().state_dict(), "method": "\x1b[31m" + "x" * 10**6}
    state, x = sq.State.from_state_dict(saved), torch.randn(2, 1, 1, 4)
    with pytest.raises(sq.StateError) as caught:
        sq.attention(x, x, x, "linear", is_causal=True, state=state)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500
