"""Attention maps against the references, and against patterns that are known."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

import subquad as sq
from subquad import reference
from subquad.report import attention_map
from tests.harness import HEADS, every_case

LENGTH = 23


@dataclass(frozen=True, kw_only=True)
class Banded(sq.Mechanism):
    """Known patterns: even heads see `window` tokens to either side, odd heads all."""

    info: ClassVar[sq.Info] = sq.Info(
        name="banded", family="sparse", engine="block_sparse", idea="", paper="", time="", memory=""
    )
    window: int = 2

    def run(self, call):
        i, j = torch.arange(call.query.shape[2])[:, None], torch.arange(call.key.shape[2])
        near = (i - j).abs() <= self.window
        seen = torch.stack([near | bool(head % 2) for head in range(call.query.shape[1])])
        seen = seen.tril() if call.is_causal else seen
        return F.scaled_dot_product_attention(call.query, call.key, call.value, attn_mask=seen), None


@every_case()
def test_every_method_in_every_direction_it_has(case):
    for is_causal in case.directions:
        shown = attention_map(case.mechanism, length=LENGTH, heads=HEADS, head_dim=8, is_causal=is_causal)
        assert sorted(head for group in shown.groups for head in group.heads) == list(range(HEADS))
        assert shown.is_causal is is_causal
        for group in shown.groups:
            assert group.weights.shape == (LENGTH, LENGTH)
            assert group.weights.isfinite().all()
            assert not is_causal or not group.weights.triu(1).any()
            assert (group.share is None) == (shown.exact is not None) == (group.error is not None)
        assert all(line.endswith(".") for line in shown.caption)


@pytest.mark.parametrize("is_causal", [False, True])
def test_softmax_computes_every_pair(is_causal):
    shown = attention_map("softmax", length=LENGTH, is_causal=is_causal)
    assert shown.share == pytest.approx((LENGTH + 1) / (2 * LENGTH) if is_causal else 1.0, abs=1e-12)
    assert shown.causal_share == (pytest.approx(1.0, abs=1e-12) if is_causal else None)
    assert shown.error is None
    assert [group.heads for group in shown.groups] == [(0, 1, 2, 3)]


@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_that_attend_alike_are_one_group(is_causal):
    shown = attention_map(Banded(), length=LENGTH, heads=5, is_causal=is_causal)
    assert [group.heads for group in shown.groups] == [(0, 2, 4), (1, 3)]
    assert [group.label.split(":")[0] for group in shown.groups] == ["heads 0, 2, 4", "heads 1, 3"]
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    band, full = (i - j).abs() <= 2, torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    if is_causal:
        band, full = band.tril(), full.tril()
    assert torch.equal(shown.groups[0].weights, band.float())
    assert torch.equal(shown.groups[1].weights, full.float())
    share = (3 * band.sum() + 2 * full.sum()).item() / (5 * LENGTH**2)
    assert shown.share == pytest.approx(share, abs=1e-12)
    if is_causal:
        assert shown.causal_share == pytest.approx(share * LENGTH**2 / full.sum().item(), abs=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "config", [sq.Linear(), sq.Plain(), sq.Efficient(), sq.Performer(features=32)], ids=lambda c: c.info.name
)
def test_effective_weights_are_the_references(config, is_causal):
    shown = attention_map(config, length=LENGTH, heads=2, head_dim=8, is_causal=is_causal, seed=3)
    torch.manual_seed(3)
    query, key = (torch.randn(1, 1, LENGTH, 8) for _ in range(2))
    weights = dict(config.build(heads=1, head_dim=8).named_buffers())
    identity = torch.eye(LENGTH, dtype=torch.float64)[None, None]
    drawn = [
        reference.attention(c, query.double(), key.double(), identity, weights=weights, is_causal=is_causal)[0, 0]
        for c in (config, sq.Softmax())
    ]
    assert [group.heads for group in shown.groups] == [(0, 1)]
    torch.testing.assert_close(shown.groups[0].weights.double(), drawn[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(shown.exact.double(), drawn[1], rtol=1e-4, atol=1e-6)
    error = torch.linalg.norm(drawn[0] - drawn[1]) / torch.linalg.norm(drawn[1])
    assert shown.error == pytest.approx(error.item(), rel=1e-4)


@pytest.mark.parametrize("name", ["linear", "taylor", "efficient", "performer", "rfa"])
def test_rows_of_averages_sum_to_one(name):
    for is_causal in (False, True):
        shown = attention_map(name, length=LENGTH, is_causal=is_causal)
        for weights in (shown.exact, *(group.weights for group in shown.groups)):
            torch.testing.assert_close(weights.sum(-1), torch.ones(LENGTH), rtol=1e-3, atol=1e-3)


def test_the_default_length_shows_what_there_is():
    assert attention_map("softmax").length == 1024
    assert attention_map("linear").length == 64


def test_what_is_only_causal_is_shown_causal_and_says_so():
    shown = attention_map(sq.RFA(gated=True), length=LENGTH)
    assert shown.is_causal
    assert any(line.startswith("Causal only: gated=True") for line in shown.caption)
    with pytest.raises(sq.UnsupportedError, match="bidirectional"):
        attention_map(sq.RFA(gated=True), length=LENGTH, is_causal=False)


def test_the_caption_names_what_the_picture_depends_on():
    assert "seed 5" in " ".join(attention_map("rfa", length=3, seed=5).caption)
    assert "parameters are untrained" in " ".join(attention_map("rfa", length=3).caption)
    assert "parameters are untrained" not in " ".join(attention_map("linear", length=3).caption)
    assert "seed" not in " ".join(attention_map(Banded(), length=3).caption)


def test_the_title_names_the_options_that_differ():
    assert attention_map(Banded(window=5), length=3).title == "banded(window=5), 3 tokens, bidirectional"
    assert attention_map("linear", length=3, is_causal=True).title == "linear, 3 tokens, causal"


def test_same_seed_same_picture_and_the_callers_generator_is_left_alone():
    before = torch.get_rng_state()
    first, again, other = (attention_map("rfa", length=LENGTH, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.groups[0].weights, again.groups[0].weights)
    assert not torch.equal(first.exact, other.exact)


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        ({"length": 0}, "length must be an integer of at least 1; got 0"),
        ({"length": 4097}, "at most 4096 tokens; got 4097"),
        ({"heads": 0}, "heads must be"),
        ({"head_dim": -1}, "head_dim must be"),
        ({"seed": -1}, "seed must be an integer"),
        ({"is_causal": 1}, "is_causal must be True or False"),
    ],
)
def test_bad_sizes(bad, rule):
    with pytest.raises(sq.InputError, match=rule):
        attention_map("linear", **{"length": 3, **bad})
