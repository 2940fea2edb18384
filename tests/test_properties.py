"""Random shapes, masks and options have two outcomes: the reference's answer, or a SubquadError."""

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import subquad as sq
from tests.harness import CASES, DIM, VALUE_DIM, WIDTH, Inputs, assert_close


def size(low, high):
    return st.integers(low, high)


@st.composite
def calls(draw):
    """A case, tensors and options; mostly consistent, now and then with one thing wrong."""
    case = draw(st.sampled_from(CASES))
    kv_heads, groups = draw(size(1, 3)), draw(size(1, 2))
    batch, queries, dim, value_dim = draw(size(0, 3)), draw(size(0, 140)), draw(size(1, 6)), draw(size(1, 4))
    is_causal = draw(st.booleans())
    keys = queries if is_causal or draw(st.booleans()) else draw(size(0, 140))
    shapes = [[batch, kv_heads * groups, queries, dim], [batch, kv_heads, keys, dim], [batch, kv_heads, keys, value_dim]]
    wrong = draw(st.sampled_from([None] * 4 + ["tensor", "padding", "attn_mask"]))
    if wrong == "tensor":
        shapes[draw(size(0, 2))][draw(size(0, 3))] += draw(size(1, 2))
    generator = torch.Generator().manual_seed(draw(size(0, 1000)))
    scale = draw(st.sampled_from([1.0, 1e-3, 3.0]))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) * scale for shape in shapes]
    hidden = torch.randn(batch, keys, 11, generator=generator, dtype=torch.float64)
    options = {"is_causal": is_causal}
    if draw(st.booleans()):
        shape = (batch, keys + (wrong == "padding"))
        options["key_padding_mask"] = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.9]))
    if draw(st.integers(0, 3)) == 0:
        full = (batch, kv_heads * groups, queries, keys)
        shape = [1 if draw(st.booleans()) else n for n in full[draw(size(0, 3)) :]]
        if wrong == "attn_mask":
            shape[-1] = keys + 2
        mask = torch.rand(shape, generator=generator, dtype=torch.float64)
        options["attn_mask"] = mask < 0.5 if draw(st.booleans()) else mask
    if draw(st.integers(0, 3)) == 0:
        options["scale"] = draw(st.sampled_from([0.0, -0.5, 0.1, 1.0]))
    return case, tensors, hidden, options, wrong


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls())
@torch.no_grad()
def test_the_references_answer_or_a_refusal(drawn):
    case, (query, key, value), hidden, options, wrong = drawn
    sizes = {"heads": query.shape[1], "kv_heads": _divisor(query, key), "head_dim": query.shape[3], "value_dim": value.shape[3]}
    module = case.mechanism.build(**sizes, dim=11).double().eval()
    x = Inputs(query, key, value, hidden)
    try:
        out = case.run(x, module, **options)
    except sq.SubquadError as refusal:
        event(type(refusal).__name__)
        needs = {name: True for name in ("key_padding_mask", "attn_mask", "scale") if name in options}
        needs["cross"] = query.shape[2] != key.shape[2]
        needs["enable_gqa"] = query.shape[1] != key.shape[1]
        needs["is_causal" if options["is_causal"] else "bidirectional"] = True
        rooted = ("performer", "hedgehog", "t2r", "hybrid")  # their features take the square root of a scale
        negative = case.info.name in rooted and options.get("scale", 1.0) <= 0
        assert wrong or negative or case.why_not(**needs)
        return
    event("answered")
    assert_close(out, case.reference(x, module, **options))


def _divisor(query, key):
    """Key-value heads to build for, where the drawn ones fit."""
    return key.shape[1] if query.shape[1] % key.shape[1] == 0 else query.shape[1]


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    case=st.sampled_from([c for c in CASES if not c.why_not(decode=True, key_padding_mask=True)]),
    pieces=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    real=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
@torch.no_grad()
def test_any_pieces_equal_the_whole(case, pieces, real, seed):
    generator = torch.Generator().manual_seed(seed)
    total = sum(pieces)
    q, k, v, h = (
        torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        for shape in [(3, total, DIM), (3, total, DIM), (3, total, VALUE_DIM), (total, WIDTH)]
    )
    mask = torch.rand(2, total, generator=generator) < real
    module, state, outs = case.build(), None, []
    for q_, k_, v_, h_, m_ in zip(*(t.split(pieces, dim=-2) for t in (q, k, v, h)), mask.split(pieces, dim=1), strict=True):
        options = {"is_causal": True, "key_padding_mask": m_, "state": state, "return_state": True}
        out, state = case.run(Inputs(q_, k_, v_, h_), module, **options)
        outs.append(out)
    assert_close(torch.cat(outs, dim=2), case.run(Inputs(q, k, v, h), module, is_causal=True, key_padding_mask=mask))
