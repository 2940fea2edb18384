"""Wrong input gets one error of the family that says the rule, what came, and what to do."""

import math

import pytest
import torch

import subquad as sq

B, H, N, D = 2, 4, 6, 8


def qkv(**shapes):
    return [torch.randn(shapes.get(name, (B, H, N, D))) for name in ("q", "k", "v")]


BAD_CALLS = {
    "3 dimensions": (qkv(q=(B, N, D)), {}, sq.InputError, r"query must have 4 dimensions.*\(2, 6, 8\).*unsqueeze"),
    "not a tensor": ([[1.0], *qkv()[1:]], {}, sq.InputError, "query must be a tensor; got list"),
    "integers": ([t.long() for t in qkv()], {}, sq.InputError, r"query must be float16.*got torch.int64.*\.float\(\)"),
    "complex": ([t.to(torch.complex64) for t in qkv()], {}, sq.InputError, "query must be float16.*complex64"),
    "two dtypes": (
        [qkv()[0].double(), *qkv()[1:]],
        {},
        sq.InputError,
        "the same dtype; got query torch.float64, key torch.float32",
    ),
    "two devices": ([qkv()[0].to("meta"), *qkv()[1:]], {}, sq.InputError, "the same device; got query meta, key cpu"),
    "two batch sizes": (qkv(q=(3, H, N, D)), {}, sq.InputError, r"the same batch size; got query \(3, 4, 6, 8\)"),
    "key and value lengths": (qkv(v=(B, H, 5, D)), {}, sq.InputError, "key and value must have the same length"),
    "key and value heads": (qkv(v=(B, 2, N, D)), {}, sq.InputError, "key and value must have the same number of heads"),
    "query and key channels": (qkv(q=(B, H, N, 3)), {}, sq.InputError, "query and key must have the same number of channels"),
    "no channels": (qkv(q=(B, H, N, 0), k=(B, H, N, 0)), {}, sq.InputError, "at least one head and one channel"),
    "no heads": (qkv(k=(B, 0, N, D), v=(B, 0, N, D)), {"enable_gqa": True}, sq.InputError, "at least one head"),
    "fewer heads, not enabled": (qkv(k=(B, 2, N, D), v=(B, 2, N, D)), {}, sq.InputError, "got 4 and 2. Set enable_gqa=True"),
    "heads that do not divide": (
        qkv(k=(B, 3, N, D), v=(B, 3, N, D)),
        {"enable_gqa": True},
        sq.InputError,
        "must divide the number of query heads; got 3 and 4",
    ),
    "causal cross": (
        qkv(q=(B, H, 3, D)),
        {"is_causal": True},
        sq.InputError,
        "got 3 queries and 6 keys. Pass the earlier keys",
    ),
    "causal with more queries": (qkv(q=(B, H, 9, D)), {"is_causal": True}, sq.InputError, "got 9 queries and 6 keys"),
    "causal as a number": (qkv(), {"is_causal": 1}, sq.InputError, "is_causal must be True or False; got 1"),
    "gqa as a word": (qkv(), {"enable_gqa": "no"}, sq.InputError, "enable_gqa must be True or False; got 'no'"),
    "sparse": ([qkv()[0].to_sparse(), *qkv()[1:]], {}, sq.InputError, "query must be a dense tensor"),
    "padding of ints": (
        qkv(),
        {"key_padding_mask": torch.ones(B, N)},
        sq.InputError,
        r"key_padding_mask must be bool.*float32.*mask\.bool\(\).*~mask",
    ),
    "padding of another shape": (
        qkv(),
        {"key_padding_mask": torch.ones(B, 7, dtype=torch.bool)},
        sq.InputError,
        r"must be \(batch, keys\) = \(2, 6\); got \(2, 7\)",
    ),
    "padding on another device": (
        qkv(),
        {"key_padding_mask": torch.ones(B, N, dtype=torch.bool, device="meta")},
        sq.InputError,
        "device of the keys, cpu; got meta",
    ),
    "mask of ints": (qkv(), {"attn_mask": torch.ones(N, N).int()}, sq.InputError, "attn_mask must be bool.*int32"),
    "mask of another float": (
        qkv(),
        {"attn_mask": torch.ones(N, N).double()},
        sq.InputError,
        "torch.float32; got torch.float64",
    ),
    "mask that does not broadcast": (
        qkv(),
        {"attn_mask": torch.ones(N, 5, dtype=torch.bool)},
        sq.InputError,
        r"broadcast to \(batch, heads, queries, keys\) = \(2, 4, 6, 6\); got \(6, 5\)",
    ),
    "mask of 5 dimensions": (qkv(), {"attn_mask": torch.ones(1, 1, 1, N, N).bool()}, sq.InputError, "must broadcast"),
    "scale NaN": (qkv(), {"scale": math.nan}, sq.InputError, "scale must be a finite number.*nan"),
    "scale beyond a float": (qkv(), {"scale": 10**400}, sq.InputError, "scale must be a finite number.*got 1000"),
    "scale beyond printing": (
        qkv(),
        {"scale": 10**5000},
        sq.InputError,
        "scale must be a finite number.*got a value of type int",
    ),
    "scale beyond float32": (qkv(), {"scale": 1e300}, sq.InputError, "scale must be 0, or from 1e-30 to 1e[+]30.*got 1e[+]300"),
    "scale below float32": (qkv(), {"scale": -1e-300}, sq.InputError, "scale must be 0, or from 1e-30 to 1e[+]30.*got -1e-300"),
    "scale a tensor": (qkv(), {"scale": torch.ones(1)}, sq.InputError, "scale must be a finite number"),
    "negative scale of a kernel": (
        qkv(),
        {"scale": -1.0, "method": "performer"},
        sq.InputError,
        "scale must be above 0; got -1.0",
    ),
    "dropout of 1": (qkv(), {"dropout_p": 1.0}, sq.InputError, "from 0 to below 1; got 1.0"),
    "negative dropout": (qkv(), {"dropout_p": -0.1}, sq.InputError, "from 0 to below 1"),
    "unknown method": (
        qkv(),
        {"method": "performr"},
        sq.UnknownMethodError,
        "no method is called 'performr'; did you mean 'performer'",
    ),
    "method of another type": (qkv(), {"method": 3}, sq.UnknownMethodError, "a name or a mechanism such as"),
    "a mechanism class": (qkv(), {"method": sq.Linear}, sq.UnknownMethodError, "a name or a mechanism such as"),
    "learned method": (qkv(), {"method": "rfa"}, sq.UnsupportedError, r"learns sigma; use subquad\.Attention"),
    "bidirectional state": (qkv(), {"return_state": True}, sq.InputError, "needs causal attention; got is_causal=False"),
    "state of another type": (qkv(), {"state": 3, "is_causal": True}, sq.StateError, "that an earlier call returned.*got int"),
}


@pytest.mark.parametrize(("tensors", "options", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_call(tensors, options, error, message):
    with pytest.raises(error, match=f"(?s){message}") as caught:
        sq.attention(*tensors, **options)
    assert isinstance(caught.value, sq.SubquadError)


def state_of(method, batch=B, heads=H, dim=D, dtype=torch.float32):
    x = torch.randn(batch, heads, N, dim, dtype=dtype)
    return sq.attention(x, x, x, method, is_causal=True, return_state=True)[1]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (state_of("softmax"), r"by the method that made it, Softmax\(\); got Linear\(\)"),
        (state_of("linear", batch=3), r"its batch size, 3; got 2. Select rows with state.reorder"),
        (state_of("linear", heads=2), "kv_heads 2 in the state, 4 in the call"),
        (state_of("linear", dim=5), "head_dim 5 in the state, 8 in the call; value_dim 5 in the state, 8 in the call"),
        (state_of("linear", dtype=torch.float64), "dtype torch.float64 in the state, torch.float32 in the call"),
        (state_of("linear").to("meta"), "on its device, meta; got cpu. Move it with state.to"),
    ],
)
def test_state_of_another(state, message):
    with pytest.raises(sq.StateError, match=message):
        sq.attention(*qkv(), "linear", is_causal=True, state=state)


def test_performer_state_of_another_draw():
    with pytest.raises(sq.StateError, match="seed=1"):
        sq.attention(*qkv(), sq.Performer(seed=1), is_causal=True, state=state_of("performer"))


BAD_OPTIONS = {
    "unknown": (lambda: sq.Performer(featurs=3), "no option 'featurs'; did you mean 'features'"),
    "unknown, none near": (lambda: sq.Linear(zzz=1), "no option 'zzz'. Options: none"),
    "by position": (lambda: sq.Performer(256), r"takes its options by name; got \(256,\)"),
    "m = 0": (lambda: sq.Performer(features=0), "features must be an integer of at least 1; got 0"),
    "a huge window": (lambda: sq.Local(window=10**30), "window must be an integer of at most 2147483647"),
    "m a float": (lambda: sq.Performer(features=2.5), "features must be an integer"),
    "m a flag": (lambda: sq.RFA(features=True), "features must be an integer"),
    "kind": (lambda: sq.Performer(kind="cosine"), "kind must be one of 'positive', .*got 'cosine'"),
    "seed": (lambda: sq.Performer(seed=-1), "seed must be an integer from 0"),
    "p without favor++": (lambda: sq.Performer(p=1.0), r"is only for kind='favor\+\+'"),
    "p = 0": (lambda: sq.Performer(kind="favor++", p=0.0), "p must be a finite number above 0"),
    "p beyond float32": (lambda: sq.Performer(kind="favor++", p=1e300), r"p must be from 1e-30 to 1e\+30, .*got 1e\+300"),
    "p beyond a float": (lambda: sq.Performer(kind="favor++", p=10**400), "p must be a finite number above 0"),
    "m beyond memory": (
        lambda: sq.Performer(features=2**31 - 1),
        "Performer.features must be at most 65536, since the weights",
    ),
    "hashes beyond memory": (
        lambda: sq.Reformer(buckets=2**10, rounds=2**10),
        "Reformer.buckets times Reformer.rounds must be at most 65536, .*got 1048576",
    ),
    "matrices beyond memory": (
        lambda: sq.Linformer(rank=2**16, max_length=2**16),
        "Linformer.rank times Linformer.max_length must be at most 2147483648",
    ),
    "iterations without end": (lambda: sq.Clustered(iterations=2**31 - 1), "iterations must be an integer of at most 1000"),
    "a huge dilation of a head": (lambda: sq.Longformer(dilation=(1, 2**62)), "dilation must be an integer below 2"),
    "a choice of arrays": (lambda: sq.Plain(normalize=torch.ones(2).numpy()), "normalize must be one of 'count', 'none'"),
    "regularized, independent": (lambda: sq.Performer(orthogonal=False, regularized=True), "orthogonal is False"),
    "flag": (lambda: sq.Performer(orthogonal="yes"), "orthogonal must be True or False"),
    "normalize": (lambda: sq.Plain(normalize="sum"), "normalize must be one of 'count', 'none'; got 'sum'"),
    "floor": (lambda: sq.RFA(floor=0.0), "floor must be a finite number above 0"),
    "a huge floor": (lambda: sq.RFA(floor=1e300), r"floor must be from 1e-30 to 1e\+30"),
    "gate without width": (lambda: sq.RFA(gated=True).build(heads=2, head_dim=4), "needs their width; got dim=None. Pass dim="),
}


@pytest.mark.parametrize(("make", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_option(make, message):
    with pytest.raises(sq.OptionError, match=message) as caught:
        make()
    assert isinstance(caught.value, TypeError)


BAD_MODULES = {
    "heads that do not divide dim": (lambda: sq.Attention(10, 4), "multiple of heads unless head_dim is given; got dim=10"),
    "zero heads": (lambda: sq.Attention(8, 0), "heads must be an integer of at least 1; got 0"),
    "kv_heads": (lambda: sq.Attention(12, 4, kv_heads=3), "must divide the number of query heads; got 3 and 4"),
    "dropout": (lambda: sq.Attention(8, 2, dropout=1.5), "from 0 to below 1; got 1.5"),
    "odd rotary": (lambda: sq.Attention(6, 2, rotary=1e4), "head_dim must be even; got 3"),
    "rotary base": (lambda: sq.Attention(8, 2, rotary=True), "a number above 1 such as 10000.0, or None; got True"),
    "rotary base beyond a float": (lambda: sq.Attention(8, 2, rotary=10**400), "a number above 1 such as 10000.0, or None"),
    "huge sizes": (lambda: sq.Attention(10**400, 2), r"dim must be an integer below 2\*\*31"),
    "scale": (lambda: sq.Attention(8, 2, scale=math.inf), "scale must be a finite number"),
    "ids instead of tokens": (lambda: sq.Attention(8, 2)(torch.ones(1, 3, 8).long()), "x must be floating point.*Embed"),
    "width of x": (lambda: sq.Attention(8, 2)(torch.ones(1, 3, 7)), r"x must be \(batch, length, 8\); got shape \(1, 3, 7\)"),
    "precision of x": (
        lambda: sq.Attention(8, 2)(torch.ones(1, 3, 8).double()),
        "precision of the layer, torch.float32; got torch.float64",
    ),
    "device of x": (lambda: sq.Attention(8, 2)(torch.ones(1, 3, 8, device="meta")), "device of the layer, cpu; got meta"),
    "bias": (lambda: sq.Attention(8, 2, bias="no"), "bias must be True or False; got 'no'"),
    "rotary and another width": (
        lambda: sq.Attention(8, 2, rotary=1e4, source_dim=6),
        "source_dim must equal dim; got 6 and 8",
    ),
    "width of source": (lambda: sq.Attention(8, 2)(torch.ones(1, 3, 8), torch.ones(1, 3, 7)), "source must be"),
    "no source of another width": (
        lambda: sq.Attention(8, 2, source_dim=5)(torch.ones(1, 3, 8)),
        "x, without a source, must be",
    ),
    "rotary to a source": (
        lambda: sq.Attention(8, 2, rotary=1e4)(torch.ones(1, 3, 8), torch.ones(1, 3, 8)),
        "need self-attention",
    ),
    "built for other sizes": (
        lambda: sq.Linear().build(heads=2, head_dim=3)(*qkv()),
        "built for heads=2, kv_heads=2, head_dim=3",
    ),
    "tokens nobody reads": (
        lambda: sq.Linear().build(heads=H, head_dim=D)(*qkv(), hidden=torch.ones(B, N, 3)),
        "does not use the hidden states, so hidden must be None; got a tensor. Leave it out",
    ),
    "tokens missing": (
        lambda: sq.RFA(gated=True).build(heads=H, head_dim=D, dim=3)(*qkv(), is_causal=True),
        r"needs the hidden states .*; got hidden=None. Pass hidden, \(batch, keys, 3\)",
    ),
    "tokens of another length": (
        lambda: sq.RFA(gated=True).build(heads=H, head_dim=D, dim=3)(*qkv(), is_causal=True, hidden=torch.ones(B, 4, 3)),
        r"hidden must be \(batch, keys, dim\) = \(2, 6, 3\)",
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD_MODULES.values(), ids=BAD_MODULES)
def test_bad_module(make, message):
    with pytest.raises(sq.InputError, match=message):
        make()


def test_module_refuses_dropout_without_weights_at_once():
    with pytest.raises(sq.UnsupportedError, match="computes no attention weights"):
        sq.Attention(8, 2, "linear", dropout=0.1)


def test_module_refuses_a_scale_it_does_not_have_at_once():
    with pytest.raises(sq.UnsupportedError, match="a scale"):
        sq.Attention(8, 2, "linear", scale=0.1)


def test_rotary_state_fits_only_rotary():
    x = torch.randn(1, 3, 8)
    plain, rotary = sq.Attention(8, 2), sq.Attention(8, 2, rotary=1e4)
    _, state = rotary(x, is_causal=True, return_state=True)
    with pytest.raises(sq.StateError, match=r"with rotary=10000\.0"):
        plain(x, is_causal=True, state=state)
    _, state = plain(x, is_causal=True, return_state=True)
    with pytest.raises(sq.StateError, match=r"with rotary=10000\.0"):
        rotary(x, is_causal=True, state=state)
    _, state = rotary(x, is_causal=True, return_state=True)
    for wrong, message in (
        (state.to("meta"), "on its device, meta"),
        (state.reorder(torch.tensor([0, 0])), "its batch size, 2; got 1"),
    ):
        with pytest.raises(sq.StateError, match=message):
            rotary(x, is_causal=True, state=wrong)


def sparse_masks():
    real, scores = torch.ones(2, 8, dtype=torch.bool), torch.zeros(8, 8)
    return [
        ("linear", {"key_padding_mask": real.to_sparse()}),
        ("softmax", {"attn_mask": scores.to_sparse()}),
        ("softmax", {"attn_mask": scores.to_sparse_csr()}),
        ("longformer", {"global_mask": real.to_sparse()}),
    ]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("number", range(4))
def test_masks_must_be_dense(number):
    method, options = sparse_masks()[number]
    q, k, v = torch.randn(3, 2, 2, 8, 4).unbind(0)
    with pytest.raises(sq.InputError, match=rf"{next(iter(options))} must be a dense tensor; got a sparse_\w+ one"):
        sq.attention(q, k, v, method, **options)


def test_tokens_must_be_dense():
    with pytest.raises(sq.InputError, match="must be a dense tensor; got a sparse_coo one"):
        sq.Attention(dim=8, heads=2, method="linear")(torch.randn(1, 5, 8).to_sparse())


@pytest.mark.parametrize("method", ["induced", "hybrid", "reformer", "performer"])
def test_a_module_on_another_device(method):
    module = sq.registry.resolve(method).build(heads=2, head_dim=4)
    x = torch.randn(1, 2, 9, 4, device="meta")
    with pytest.raises(sq.InputError, match=r"must be on the device of the module, cpu, .*; got meta"):
        module(x, x, x)
