import copy
import dataclasses
import pickle
from pathlib import Path

import pytest

import subquad as sq
from subquad import reference
from subquad.families.base import NEEDS
from subquad.mechanisms import MECHANISMS
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
    with pytest.raises(sq.InputError, match="no need called 'causal'; did you mean 'is_causal'"):
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
    assert "only when causal" in sq.why_not(sq.RFA(gated=True), cross=True)[0]


def test_a_refusal_does_not_send_back_to_the_refused_options():
    with pytest.raises(sq.UnsupportedError, match="rfa with its default options"):
        require(sq.RFA(gated=True), ["bidirectional"])


@pytest.mark.parametrize("name", sq.methods())
def test_records_are_complete_and_frozen(name):
    info = sq.info(name)
    assert info.name == name
    assert info.family in {"exact", "kernelized", "hybrid", "sparse", "bucketed", "low_rank"}
    assert (Path(sq.__file__).parent / "engines" / f"{info.engine}.py").exists() or (
        Path(sq.__file__).parent / "engines" / info.engine
    ).is_dir()
    assert all([info.idea, info.paper, info.time, info.memory])
    assert "\n" not in info.idea
    assert bool(info.state) == ("decode" in info.supports)
    assert set(info.refuses) <= set(NEEDS)
    assert name in reference.FUNCTIONS
    assert vars(pickle.loads(pickle.dumps(info))) == vars(copy.deepcopy(info)) == vars(info)
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.name = "other"
    with pytest.raises(TypeError):
        info.refuses["decode"] = "no"


def test_mechanisms_are_frozen_values():
    assert sq.Performer(features=8) == sq.Performer(features=8)
    assert hash(sq.Performer(features=8)) == hash(sq.Performer(features=8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        sq.Performer().features = 3
    assert sq.info(sq.Performer(features=8)) is sq.info("performer")


def test_a_second_mechanism_of_the_same_name_is_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Again(MECHANISMS[0]):
        pass

    with pytest.raises(sq.OptionError, match="two mechanisms are called 'softmax'"):
        sq.register(Again)
