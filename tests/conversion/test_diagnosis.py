"""What `diagnose` says of conversions whose damage is known."""

import pytest
import torch

import subquad as sq
from tests.conversion import families

BATCHED = ("llama", "bert", "vit", "bart", "whisper")


def batches(name, count=3):
    return [families.inputs(name) for _ in range(count)]


@pytest.mark.parametrize("name", BATCHED)
def test_no_damage_where_nothing_is_lost(name):
    """A window that is wider than the sequence is softmax."""
    original = families.model(name)
    found = sq.diagnose(original, sq.convert(original, sq.Local(window=100), copy=True), batches(name))
    assert all(head.error < 1e-5 and head.kl < 1e-5 for head in found.heads)
    assert found.cosine == pytest.approx(1, abs=1e-6)
    assert (found.loss_before is None) == (name != "llama")


@pytest.mark.parametrize("name", BATCHED)
def test_damage_by_head(name):
    original = families.model(name)
    converted = sq.convert(original, "linear", copy=True, layers=[1])
    given = batches(name)
    before = families.outputs(original, given[0])
    found = sq.diagnose(original, converted, given)
    assert {head.layer for head in found.heads} == {1}
    assert all(head.error > 1e-4 and head.kl > 0 for head in found.heads)
    assert found.cosine < 1
    errors = [head.error for head in found.ranked()]
    assert errors == sorted(errors, reverse=True)
    assert torch.equal(families.outputs(original, given[0]), before), "the original is left as it is"


def test_the_error_is_that_of_the_mechanism_on_the_originals_input():
    original = families.model("bert")
    converted = sq.convert(original, sq.Local(window=1), copy=True)
    ids = families.inputs("bert")["input_ids"]
    [layer] = [original.encoder.layer[0].attention.self]
    hidden = original.embeddings(input_ids=ids)
    q, k, v = (f(hidden).unflatten(-1, (3, -1)).transpose(1, 2) for f in (layer.query, layer.key, layer.value))
    expected, found = sq.attention(q, k, v), sq.attention(q, k, v, sq.Local(window=1))
    errors = ((found - expected).square().sum((0, 2, 3)) / expected.square().sum((0, 2, 3))).sqrt()
    heads = [head for head in sq.diagnose(original, converted, [{"input_ids": ids}] * 3).heads if head.layer == 0]
    assert [head.error for head in heads] == pytest.approx(errors.tolist(), rel=1e-4)


def test_the_losses_are_those_of_the_models():
    original = families.model("llama")
    converted = sq.convert(original, sq.Local(window=2), copy=True)
    ids = torch.randint(3, families.WORDS, (4, 30))
    found = sq.diagnose(original, converted, [{"input_ids": ids}])
    with torch.no_grad():
        assert found.loss_before == pytest.approx(original(input_ids=ids, labels=ids).loss.item(), rel=1e-5)
        assert found.loss_after == pytest.approx(converted(input_ids=ids, labels=ids).loss.item(), rel=1e-5)
    assert found.perplexity_after == pytest.approx(torch.tensor(found.loss_after).exp().item(), rel=1e-5)


def test_it_is_refused_on_too_little_or_on_another_pair():
    original = families.model("llama")
    converted = sq.convert(original, "linear", copy=True)
    with pytest.raises(sq.InputError, match="at least 64 tokens; got 6"):
        sq.diagnose(original, converted, [{"input_ids": torch.arange(3, 9)[None]}])
    given = batches("llama", 5)
    with pytest.raises(sq.InputError, match="not converted"):
        sq.diagnose(original, original, given)
    with pytest.raises(sq.InputError, match="copy=True"):
        sq.diagnose(converted, converted, given)
    with pytest.raises(sq.InputError, match="must have the same architecture"):
        sq.diagnose(families.model("bert"), converted, given)


@pytest.mark.parametrize(
    "batches", [{"input_ids": torch.ones(2, 40).long()}, [torch.ones(2, 40).long()], [{"input_ids": [1]}], [{}]]
)
def test_it_is_refused_what_no_model_reads(batches):
    original = families.model("llama")
    with pytest.raises(sq.InputError, match="batches must be inputs of the model"):
        sq.diagnose(original, sq.convert(original, "linear", copy=True), batches)
