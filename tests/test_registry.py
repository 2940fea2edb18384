import dataclasses
from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad import reference, registry
from subquad.registry import require


def test_methods():
    kernelized = ["linear", "taylor", "plain", "efficient", "performer", "rfa", "hedgehog", "t2r"]
    sparse = ["local", "sparse_strided", "sparse_fixed", "longformer", "bigbird"]
    bucketed, low_rank = ["reformer", "routing", "clustered"], ["linformer", "nystrom", "pooled", "induced", "svd"]
    assert sq.methods() == ["softmax", *kernelized, "hybrid", *sparse, *bucketed, *low_rank]
    assert sq.methods(attn_mask=True) == ["softmax"]
    assert sq.methods(global_mask=True) == ["longformer"]
    assert set(sq.methods()) - set(sq.methods(functional=True)) == {
        "rfa", "hedgehog", "t2r", "hybrid", "linformer", "induced",
    }  # fmt: skip
    causal = ["softmax", *kernelized, "hybrid", "local", "longformer", "bigbird", "reformer", "routing", "pooled"]
    assert sq.methods(is_causal=True) == sq.methods(is_causal=True, decode=True) == causal
    assert sq.methods(cross=True) == ["softmax", *kernelized, "clustered", "linformer", "induced"]
    assert set(sq.methods(cross=True)) - set(sq.methods(decoder_cross=True)) == {"clustered"}
    assert sq.methods(is_causal=False) == sq.methods()


def test_unknown_need():
    with pytest.raises(sq.InputError, match="no requirement is called 'causal'; did you mean 'is_causal'"):
        sq.methods(causal=True)
    with pytest.raises(sq.InputError, match=r"True \(needed\) or False \(not needed\); got 1"):
        sq.why_not("linear", is_causal=1)


def test_why_not():
    assert sq.why_not("linear", is_causal=True, decode=True) == []
    (reason,) = sq.why_not("linear", attn_mask=True)
    assert reason.startswith("an attn_mask: ")
    assert len(sq.why_not("linear", attn_mask=True, scale=True, dropout_p=True)) == 3
    assert sq.why_not(sq.Performer(kind="favor++", p=1.0), is_causal=True) == []
    assert "set p" in sq.why_not(sq.Performer(kind="favor++"), decode=True)[0]
    assert "set stride" in sq.why_not("sparse_fixed", is_causal=True)[0]
    assert sq.why_not(sq.SparseFixed(stride=8), decode=True, key_padding_mask=True) == []
    assert "defined for causal attention only" in sq.why_not(sq.RFA(gated=True), cross=True)[0]


def test_a_refusal_does_not_send_back_to_the_refused_options():
    with pytest.raises(sq.UnsupportedError, match="rfa with its default options"):
        require(sq.RFA(gated=True), ["bidirectional"])


@pytest.mark.parametrize("name", sq.methods())
def test_records_name_their_family_and_engine(name):
    """What every record has to say, the contract tests."""
    info = sq.info(name)
    assert info.family in {"exact", "kernelized", "hybrid", "sparse", "bucketed", "low_rank"}
    engines = Path(sq.__file__).parent / "engines"
    assert (engines / f"{info.engine}.py").exists() or (engines / info.engine / "__init__.py").exists()
    assert name in reference.FUNCTIONS


def test_mechanisms_are_frozen_values():
    assert sq.Performer(features=8) == sq.Performer(features=8)
    assert hash(sq.Performer(features=8)) == hash(sq.Performer(features=8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        sq.Performer().features = 3
    assert sq.info(sq.Performer(features=8)) is sq.info("performer")


INFO = sq.Info(name="mine", family="exact", engine="dense", idea="an idea", paper="none", time="O(1)", memory="O(1)")


def mechanism(base=sq.Mechanism, **members):
    """A frozen mechanism class, not registered."""
    members = {"info": INFO, "run": lambda self, call: (call.value, None), "__annotations__": {}, **members}
    return dataclasses.dataclass(frozen=True, kw_only=True)(type("Mine", (base,), members))


@pytest.fixture
def unregistered():
    """Mechanisms that a test registers are forgotten after it."""
    before = dict(registry._DEFAULTS)
    yield
    registry._DEFAULTS.clear()
    registry._DEFAULTS.update(before)


@pytest.mark.usefixtures("unregistered")
def test_register_makes_a_mechanism_known():
    mine = mechanism(size=3, __annotations__={"size": int})
    assert sq.register(mine) is mine
    assert sq.register(mine) is mine  # a second time changes nothing
    assert "mine" in sq.methods()
    assert sq.info("mine") is INFO
    assert registry.from_record({"name": "mine", "size": 5}) == mine(size=5)
    x = torch.randn(1, 2, 3, 4)
    assert torch.equal(sq.attention(x, x, x, "mine"), x)


def not_frozen():
    return dataclasses.dataclass(kw_only=True)(type("Mine", (sq.Mechanism,), {"info": INFO, "run": lambda self, call: None}))


def frozen_base_only():
    return type("Mine", (mechanism(),), {})


def named(name):
    return mechanism(info=dataclasses.replace(INFO, name=name))


REFUSED = {
    "no class": (lambda: "linear", r"takes a subclass of subquad\.Mechanism; got 'linear'"),
    "an instance": (lambda: mechanism()(), r"takes a subclass of subquad\.Mechanism; got Mine\(\)"),
    "another class": (lambda: dict, r"takes a subclass of subquad\.Mechanism; got <class 'dict'>"),
    "no info": (lambda: mechanism(info=None), r"Mine\.info must be a subquad\.Info; got None"),
    "not frozen": (not_frozen, r"Mine must be a frozen dataclass: @dataclass\(frozen=True, kw_only=True\)"),
    "not a dataclass itself": (frozen_base_only, "Mine must be a frozen dataclass"),
    "capital letters": (lambda: named("Mine"), "lower-case letters, digits and underscores, .*; got 'Mine'"),
    "no name": (lambda: named(""), "lower-case letters, digits and underscores, .*; got ''"),
    "a reserved name": (lambda: named("all"), "must not be all or sdpa; got 'all'"),
    "a known name": (
        lambda: named("softmax"),
        r"two mechanisms are called 'softmax': subquad\.mechanisms\.softmax\.Softmax and",
    ),
    "an unknown need": (
        lambda: mechanism(info=dataclasses.replace(INFO, refuses={"causal": "no"})),
        "mine.info.refuses has unknown requirements: causal. Requirements: is_causal, ",
    ),
    "no default": (lambda: mechanism(__annotations__={"size": int}), r"Mine must have a default for every option.*'size'"),
    "no run": (lambda: mechanism(run=sq.Mechanism.run), "Mine must have .* a run method: .*abstract"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_register_refuses(make, message):
    before = dict(registry._DEFAULTS)
    with pytest.raises(sq.OptionError, match=message):
        sq.register(make())
    assert before == registry._DEFAULTS


class Entry:
    """An entry point of an installed package."""

    name, value = "broken", "broken_package:Broken"

    def __init__(self, load):
        self.load = load


def fails():
    raise ModuleNotFoundError("No module named 'broken_package'")


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize(
    ("load", "reason"), [(fails, "No module named 'broken_package'"), (lambda: named("linear"), "called 'linear'")]
)
def test_a_broken_entry_point_warns_and_is_left_out(monkeypatch, load, reason):
    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry(load), Entry(mechanism)])
    with pytest.warns(UserWarning, match=f"'broken' .* is left out: broken_package:Broken: .*{reason}"):
        registry._load_plugins.__wrapped__()
    assert "mine" in registry._DEFAULTS  # the entry point after it
    assert registry._DEFAULTS["linear"] == sq.Linear()
