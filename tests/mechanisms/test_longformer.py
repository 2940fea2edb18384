import copy
from itertools import pairwise

import pytest
import torch

import subquad as sq
from tests.harness import DIM, VALUE_DIM, WIDTH, Case, assert_close, inputs

N = 30
GLOBALS = {
    "one each": ([3], [17]),
    "many and few": ([0, 4, 5, 6, 28, 29], [11]),
    "none in one row": ([2, 20], []),
    "none at all": ([], []),
    "all": (range(N), [0]),
}
PADS = {
    "no pads": None,
    "right": [range(N), range(13)],
    "left": [range(9, N), range(N)],
    "holes": [[t for t in range(N) if t % 3 != 2], [t for t in range(N) if t not in (0, 11, 12, 17)]],
    "an empty row": [range(N), []],
}


def marked(rows, length=N):
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, positions in zip(mask, rows, strict=True):
        row[list(positions)] = True
    return mask


def weights_of(mechanism, x, **options):
    """(B, H, N, N): what each query gives to each key."""
    batch, heads, length, _ = x.key.shape
    return sq.attention(x.query, x.key, torch.eye(length).double().expand(batch, heads, -1, -1), mechanism, **options)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dilation", [(1, 2, 3, 1), (4, 4, 4, 4), (5, 1, 1, 1)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@torch.no_grad()
def test_every_head_has_its_dilation(dilation, kv_heads, is_causal):
    x = inputs(37, heads=4, kv_heads=kv_heads)
    case = Case(sq.Longformer(window=3, dilation=dilation, num_global=2))
    found = case.function(x, is_causal=is_causal, enable_gqa=True)
    assert_close(found, case.reference(x, is_causal=is_causal))
    for head, d in enumerate(dilation):
        alone = sq.attention(
            x.query[:, head : head + 1],
            *(t[:, head * kv_heads // 4][:, None] for t in (x.key, x.value)),
            sq.Longformer(window=3, dilation=d, num_global=2),
            is_causal=is_causal,
        )
        assert_close(found[:, head : head + 1], alone)


@torch.no_grad()
def test_dilations_of_heads_in_a_state():
    x = inputs(40, heads=4, kv_heads=2)
    mechanism = sq.Longformer(window=2, dilation=(3, 1, 1, 5), num_global=1)
    whole = sq.attention(x.query, x.key, x.value, mechanism, is_causal=True, enable_gqa=True)
    state, outs = None, []
    for start, end in pairwise((0, 13, 14, 15, 33, 40)):
        part = x.tokens(start, end)
        options = {"is_causal": True, "enable_gqa": True, "state": state, "return_state": True}
        out, state = sq.attention(part.query, part.key, part.value, mechanism, **options)
        outs.append(out)
    assert_close(torch.cat(outs, dim=2), whole)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pads", PADS.values(), ids=PADS)
@pytest.mark.parametrize("rows", GLOBALS.values(), ids=GLOBALS)
@torch.no_grad()
def test_global_mask(rows, pads, is_causal):
    options = {
        "is_causal": is_causal,
        "global_mask": marked(rows),
        "key_padding_mask": None if pads is None else marked(pads),
    }
    for mechanism in (sq.Longformer(window=4, num_global=3), sq.Longformer(window=2, dilation=(1, 3, 2))):
        x = inputs(N)
        found = Case(mechanism).function(x, **options)
        assert_close(found, Case(mechanism).reference(x, **options))
        if pads is not None:
            assert (found.movedim(1, 2)[~options["key_padding_mask"]] == 0).all()


@pytest.mark.parametrize("pads", ["no pads", "holes"])
def test_gradients_with_a_global_mask(pads):
    options = {"global_mask": marked(GLOBALS["none in one row"])}
    if PADS[pads] is not None:
        options["key_padding_mask"] = marked(PADS[pads])
    case, x = Case(sq.Longformer(window=4)), inputs(N, grad=True)
    qkv = x.query, x.key, x.value
    found = torch.autograd.grad(case.function(x, **options).square().sum(), qkv)
    expected = torch.autograd.grad(case.reference(x, **options).square().sum(), qkv)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)


@torch.no_grad()
def test_a_global_mask_replaces_the_first_tokens():
    x = inputs(N)
    mask = marked(GLOBALS["many and few"])
    few, many = (sq.attention(x.query, x.key, x.value, sq.Longformer(window=2, num_global=n), global_mask=mask) for n in (0, 5))
    assert torch.equal(few, many)
    nobody = sq.attention(x.query, x.key, x.value, sq.Longformer(window=2, num_global=5), global_mask=marked([[], []]))
    assert_close(nobody, sq.attention(x.query, x.key, x.value, sq.Local(window=2)))
    first = sq.attention(x.query, x.key, x.value, sq.Longformer(window=2, num_global=0), global_mask=marked([range(5)] * 2))
    assert_close(first, sq.attention(x.query, x.key, x.value, sq.Longformer(window=2, num_global=5)))


def test_a_global_mask_and_a_state_are_refused_together():
    x = inputs(5)
    options = {"is_causal": True, "return_state": True}
    with pytest.raises(sq.InputError, match=r"a later token might be global and attend to every earlier key.*num_global"):
        sq.attention(x.query, x.key, x.value, sq.Longformer(), global_mask=marked([[0], [1]], 5), **options)
    _, state = sq.attention(x.query, x.key, x.value, sq.Longformer(), **options)
    with pytest.raises(sq.InputError, match="cannot decode with a global_mask"):
        sq.attention(x.query, x.key, x.value, sq.Longformer(), global_mask=marked([[0], [1]], 5), is_causal=True, state=state)


@pytest.mark.parametrize("dilation", [(1,), (1, 2), (1, 2, 3, 4)])
def test_one_dilation_for_each_head(dilation):
    x = inputs(5)
    with pytest.raises(sq.InputError, match=f"one number per head; got {len(dilation)} for 3 heads"):
        sq.attention(x.query, x.key, x.value, sq.Longformer(dilation=dilation))


@pytest.mark.parametrize("dilation", [(), (1, 0), (1, 2.0), (True, 1), 0, 1.5])
def test_dilation_is_a_count(dilation):
    with pytest.raises(sq.OptionError, match=r"Longformer.dilation must be an integer of at least 1"):
        sq.Longformer(dilation=dilation)


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_a_global_token_inside_the_window_counts_once(is_causal):
    """Equal scores: each key that is seen has the same weight, and no more of it for being global and near."""
    x = inputs(N)
    x.query.zero_()
    chosen = marked([[3, 4, 20], [0]])
    found = weights_of(sq.Longformer(window=3), x, global_mask=chosen, is_causal=is_causal)
    i, j = torch.arange(N)[:, None], torch.arange(N)
    seen = ((i - j).abs() <= 3) | chosen[:, None, :] | chosen[:, :, None]
    seen = seen & (j <= i) if is_causal else seen
    expected = seen.double() / seen.sum(-1, keepdim=True)
    assert_close(found, expected.unsqueeze(1).expand_as(found))
    assert_close(found.sum(-1), torch.ones(found.shape[:3], dtype=torch.float64))


@torch.no_grad()
def test_more_globals_than_tokens():
    x = inputs(6)
    assert_close(
        sq.attention(x.query, x.key, x.value, sq.Longformer(window=0, num_global=50)), sq.attention(x.query, x.key, x.value)
    )


def build(seed, **options):
    torch.manual_seed(seed)
    mechanism = sq.Longformer(window=2, num_global=3, global_projections=True)
    return mechanism.build(heads=4, head_dim=DIM, value_dim=VALUE_DIM, dim=WIDTH, **options)


@torch.no_grad()
def test_global_projections_are_saved_loaded_and_moved(tmp_path):
    x = inputs(20, heads=4, kv_heads=2)
    one, other = (build(seed, kv_heads=2).double() for seed in (1, 2))
    expected = one(x.query, x.key, x.value, hidden=x.hidden)
    assert not torch.allclose(other(x.query, x.key, x.value, hidden=x.hidden), expected)
    torch.save(one.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(other(x.query, x.key, x.value, hidden=x.hidden), expected)
    assert sorted(dict(one.named_parameters())) == sorted(
        f"global_{name}_{part}" for name in ("query", "key", "value") for part in ("weight", "bias")
    )
    shapes = {name: tuple(p.shape) for name, p in one.named_parameters() if name.endswith("weight")}
    assert shapes == {
        "global_query_weight": (4 * DIM, WIDTH),
        "global_key_weight": (2 * DIM, WIDTH),
        "global_value_weight": (2 * VALUE_DIM, WIDTH),
    }
    assert all(p.dtype == torch.float32 for p in copy.deepcopy(one).to(torch.float32).parameters())
    assert all(p.device.type == "meta" for p in copy.deepcopy(one).to("meta").parameters())
    single = copy.deepcopy(one).to(torch.float32)
    found = single(*(t.float() for t in (x.query, x.key, x.value)), hidden=x.hidden.float())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_global_projections_change_global_rows_only_and_learn():
    x = inputs(20, heads=4)
    module = build(0).double()
    found = module(x.query, x.key, x.value, hidden=x.hidden)
    plain = sq.attention(x.query, x.key, x.value, sq.Longformer(window=2, num_global=3))
    assert_close(found[:, :, 3:], plain[:, :, 3:])
    assert ((found - plain)[:, :, :3].abs().amax(-1) > 1e-6).all()
    found.square().sum().backward()
    for name, parameter in module.named_parameters():
        if name != "global_key_bias":  # a shift of all scores of a row, which softmax does not see
            assert (parameter.grad != 0).any(), name
    torch.testing.assert_close(module.global_key_bias.grad, torch.zeros_like(module.global_key_bias), atol=1e-12, rtol=0)


@pytest.mark.parametrize("rows", GLOBALS.values(), ids=GLOBALS)
@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_global_mask_with_global_projections(rows, is_causal):
    case, x = Case(sq.Longformer(window=3, global_projections=True)), inputs(N)
    options = {"is_causal": is_causal, "global_mask": marked(rows), "key_padding_mask": marked(PADS["holes"])}
    assert_close(case.run(x, **options), case.reference(x, **options))


def test_dilations_for_other_heads_are_refused_when_built():
    with pytest.raises(sq.InputError, match="one number per head; got 3 for 4 heads"):
        sq.Longformer(dilation=(1, 2, 3)).build(heads=4, head_dim=8)
