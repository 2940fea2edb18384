"""Calls inside of something that changes how PyTorch works: the same answer as without it, or a refusal; and none afterwards."""

from contextlib import suppress

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import subquad as sq
from subquad.registry import resolve

FUNCTIONS = sq.methods(functional=True)
RANDOM = [name for name in FUNCTIONS if resolve(name).info.random]


def tensors(name):
    q, k, v = torch.randn(3, 1, 2, 40, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    return (k, k, v) if resolve(name).shares_query_and_key else (q, k, v)


def attend(name, q, k, v):
    return sq.attention(k if resolve(name).shares_query_and_key else q, k, v, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_default_device(name):
    given = tensors(name)
    expected = attend(name, *given)
    with torch.device("meta"):
        found = attend(name, *given)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", RANDOM)
def test_a_functionalized_call_leaves_nothing_behind(name):
    q, k, v = tensors(name)
    mechanism = sq.registry.resolve(name)
    mechanism = type(mechanism)(seed=12345)  # not drawn by another test
    expected = mechanism.build(heads=2, head_dim=4).eval()(q, k, v)
    with suppress(RuntimeError):  # of PyTorch, which has no functional form of some operations
        torch.func.functionalize(lambda v: sq.attention(q, k, v, mechanism))(v)
    torch.testing.assert_close(sq.attention(q, k, v, mechanism), expected)


@pytest.mark.parametrize("name", ["performer", "rfa"])
def test_make_fx_takes_what_is_drawn_as_a_constant(name):
    module = type(resolve(name))(seed=12346).build(heads=2, head_dim=4)
    q, k, v = tensors(name)
    run = (lambda q: sq.attention(q, k, v, module.method)) if name in FUNCTIONS else (lambda q: module(q, k, v))
    graph = make_fx(run)(q)
    torch.testing.assert_close(graph(q), module(q, k, v))
    torch.testing.assert_close(graph(2 * q), module(2 * q, k, v))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["softmax", "linear", "local"])
def test_a_call_in_torch_jit_trace_is_refused(name):
    with pytest.raises(sq.UnsupportedError, match=r"got a traced call\. Use torch\.export or torch\.compile"):
        torch.jit.trace(lambda *x: attend(name, *x), tensors(name), check_trace=False)


@pytest.mark.parametrize("name", sq.methods(decode=True, functional=True))
def test_gradients_of_a_prompt_whose_continuation_needs_none(name):
    prompt = [x.detach().requires_grad_() for x in tensors(name)]
    if resolve(name).shares_query_and_key:
        prompt[0] = prompt[1]
    mechanism = resolve(name).for_length(64)

    def run(*pieces):
        total, state = 0.0, None
        for piece in pieces:
            out, state = sq.attention(*piece, mechanism, is_causal=True, state=state, return_state=True)
            total = total + out.square().sum()
        return torch.autograd.grad(total, prompt[1:])

    more = [x.detach() for x in tensors(name)]
    if resolve(name).shares_query_and_key:
        more[0] = more[1]

    def token(t):
        piece = [x[:, :, t : t + 1] for x in more]
        return [piece[1], *piece[1:]] if resolve(name).shares_query_and_key else piece

    whole = [torch.cat([x, y[:, :, :3]], dim=2) for x, y in zip(prompt, more, strict=True)]
    if resolve(name).shares_query_and_key:
        whole[0] = whole[1]
    for found, expected in zip(run(prompt, token(0), token(1), token(2)), run(whole), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
